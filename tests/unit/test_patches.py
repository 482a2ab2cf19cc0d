# SPDX-License-Identifier: Apache-2.0
"""Contract with the functions of vLLM that are wrapped: fails when vLLM changes them."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
import vllm
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.renderers import BaseRenderer, ChatParams, TokenizeParams
from vllm.renderers.hf import HfRenderer
from vllm.sampling_params import SamplingParams
from vllm.utils import cpu_triton_utils
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker import mamba_utils

from vllm_tgvkv.engine import patches
from vllm_tgvkv.plugin import UnsupportedVllmError, check_vllm_version, register
from vllm_tgvkv.server.streams import transfers_of
from vllm_tgvkv.worker import cpu_states
from vllm_tgvkv.worker.cpu import expand_batch_to_tokens

CHAT = ["self", "conversations", "chat_params", "tok_params", "prompt_extras", "skip_mm_cache"]
PARAMETERS: dict[tuple[type, str], list[str]] = {
    (EngineArgs, "add_cli_args"): ["parser"],
    (EngineArgs, "from_cli_args"): ["cls", "args"],
    (EngineArgs, "create_engine_config"): ["self", "usage_context", "headless"],
    (InputProcessor, "process_inputs"): [
        *("self", "request_id", "prompt", "params", "supported_tasks", "arrival_time"),
        *("lora_request", "tokenization_kwargs", "trace_headers", "priority"),
        *("data_parallel_rank", "resumable", "session_id", "kv_hints"),
    ],
    (BaseRenderer, "render_chat"): CHAT,
    (BaseRenderer, "render_chat_async"): CHAT,
    (BaseServing, "_check_model"): ["self", "request"],
    (AnthropicServingMessages, "create_messages"): ["self", "request", "raw_request"],
    (OpenAIServingChat, "chat_completion_stream_generator"): [
        *("self", "request", "result_generator", "request_id", "model_name", "conversation"),
        *("tokenizer", "request_metadata", "chat_template_kwargs", "mm_token_counts"),
    ],
    (OpenAIServingCompletion, "completion_stream_generator"): [
        *("self", "request", "engine_inputs", "result_generator", "request_id", "created_time"),
        *("model_name", "num_prompts", "tokenizer", "request_metadata"),
    ],
    (RequestOutput, "add"): ["self", "next_output", "aggregate"],
}
"""The wrapped functions, with the parameters that the wrappers expect."""


@pytest.mark.parametrize(("owner", "name"), PARAMETERS)
def test_parameters_are_as_the_wrappers_expect(owner: type, name: str) -> None:
    original = inspect.unwrap(patches.function_of(owner, name))
    assert original.__module__.startswith("vllm.")
    assert list(inspect.signature(original).parameters) == PARAMETERS[owner, name]


def test_bindings_are_vllms() -> None:
    """A wrapper has the binding of the function it replaces: static, class method, method."""
    register()
    patches.install_request_handling()
    patches.install_serving()
    kinds = [type(owner.__dict__[name]).__name__ for owner, name in PARAMETERS]
    assert kinds == ["staticmethod", "classmethod", *["function"] * 9]


def test_subclasses_do_not_bypass_the_wrappers() -> None:
    """`vllm serve` uses `AsyncEngineArgs`: it inherits, or calls the function of `EngineArgs`."""
    assert "from_cli_args" not in AsyncEngineArgs.__dict__
    assert "create_engine_config" not in AsyncEngineArgs.__dict__
    source = inspect.getsource(AsyncEngineArgs.add_cli_args)
    assert source.index("load_general_plugins()") < source.index("EngineArgs.add_cli_args(parser)")


def test_fields_the_wrappers_read_and_write() -> None:
    fields = inspect.signature(EngineArgs).parameters
    assert {"additional_config", "scheduler_cls", "worker_cls"} <= set(fields)
    assert fields["scheduler_cls"].default is None
    assert fields["worker_cls"].default == "auto"
    assert "vllm_config" in inspect.getsource(InputProcessor.__init__)
    assert "extra_args" in SamplingParams.__struct_fields__
    assert issubclass(VLLMValidationError, VLLMClientError)  # HTTP 400
    assert "additional_config" in VllmConfig.__dataclass_fields__
    assert "sampling_params" in EngineCoreRequest.__struct_fields__
    assert {"chat_template", "chat_template_content_format", "chat_template_kwargs"} <= set(
        ChatParams.__dataclass_fields__
    )
    assert "add_special_tokens" in TokenizeParams.__dataclass_fields__
    assert "self.config = config" in inspect.getsource(BaseRenderer.__init__)


def test_every_chat_goes_through_the_wrapped_doors() -> None:
    """No renderer has doors of its own, and what they return reaches `process_inputs` as it is."""
    doors = {"render_chat", "render_chat_async"}
    renderers = [BaseRenderer]
    for renderer in renderers:
        renderers.extend(renderer.__subclasses__())
        assert renderer is BaseRenderer or doors.isdisjoint(renderer.__dict__)
    assert HfRenderer in renderers


def test_wrapping_twice_wraps_once() -> None:
    for _ in range(2):
        register()
        patches.install_request_handling()
        patches.install_serving()
    for owner, name in PARAMETERS:
        assert patches.is_wrapped(owner, name)
        function = patches.function_of(owner, name)
        assert function.__wrapped__ is inspect.unwrap(function)  # type: ignore[attr-defined]


def test_a_report_stays_where_results_are_taken_together() -> None:
    """A choice has ended; another one goes on, or ends as well, and ends are told apart."""
    patches.install_serving()

    def result(index: int, transfer: dict[str, int] | None) -> RequestOutput:
        choice = CompletionOutput(index, "a", [1], None, None)
        return RequestOutput("r", None, [1], None, [choice], False, kv_transfer_params=transfer)

    for following in (None, {"second": 2}):
        together = result(0, {"first": 1})
        together.add(result(1, following), aggregate=False)
        together.add(result(1, None), aggregate=True)
        assert [choice.index for choice in together.outputs] == [0, 1]
        assert transfers_of(together) == {0: {"first": 1}, 1: following}


def test_the_table_lists_what_is_wrapped() -> None:
    """The module's docstring names every wrapped function, and nothing else is wrapped."""
    listed = re.findall(r"^\| `(\w+)\.(\w+)` \|", patches.__doc__ or "", flags=re.MULTILINE)
    assert listed == [(owner.__name__, name) for owner, name in PARAMETERS]
    calls = re.findall(r'^ {4}_wrap\((\w+), "(\w+)"', inspect.getsource(patches), re.MULTILINE)
    assert calls == listed


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_numbers_of_requests_reach_their_drafts(dtype: torch.dtype) -> None:
    """Once vLLM's function is right on CPU as well, the replacement can go."""
    current_platform.import_kernels()
    given = torch.tensor([3, 0, 7, 5], dtype=dtype), torch.tensor([2, 3, 3, 6])
    wanted = torch.tensor([3, 3, 1, 5, 5, 5], dtype=dtype)
    found = expand_batch_to_tokens(*given, len(wanted), replace_from=0, replace_to=1)
    assert found.dtype == dtype
    assert torch.equal(found, wanted)
    theirs = torch.full_like(wanted, -9)
    cpu_triton_utils._expand_kernel_impl(theirs, *given, 0, 1)
    assert torch.equal(theirs, wanted) == (dtype == torch.int64)


def test_vllm_looks_up_the_replaced_function_with_these_parameters() -> None:
    module = ast.parse(Path(rejection_sampler.__file__).read_text())
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    theirs = [argument.arg for argument in functions["expand_batch_to_tokens"].args.args]
    assert theirs == list(inspect.signature(expand_batch_to_tokens).parameters)
    called = [
        node.func.id
        for node in ast.walk(functions["apply_sampling_constraints"])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert called.count("expand_batch_to_tokens") == 3


def test_vllm_calls_the_repaired_functions_of_states() -> None:
    """With these parameters; vLLM itself has nothing on CPU in place of the kernels."""
    ours, theirs = (
        list(inspect.signature(function).parameters)
        for function in (cpu_states.spec_forward, cpu_states._spec_forward)
    )
    assert ours == theirs
    states = ["block_table_ptrs_ptr", "block_table_stride_req"]
    kinds = "base_addrs block_strides elem_sizes inner_sizes conv_widths group_indices"
    kinds += " dim_row_count dim_row_stride"
    states += [f"state_{kind}_ptr" for kind in kinds.split()]
    module = ast.parse(Path(mamba_utils.__file__).read_text())
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    for kernel, before, after in (
        (
            "precopy_mamba_align_fused_kernel",
            ["mamba_state_idx_ptr", "src_col_ptr", "token_bias_ptr"],
            ["idx_mapping_ptr", "num_reqs"],
        ),
        (
            "postprocess_mamba_fused_kernel",
            [
                *("num_accepted_tokens_ptr", "mamba_state_idx_ptr", "num_scheduled_tokens_ptr"),
                *("num_computed_tokens_ptr", "num_draft_tokens_ptr"),
            ],
            ["num_accepted_tokens_out_ptr", "idx_mapping_ptr", "num_reqs"],
        ),
    ):
        wanted = [*before, *states, *after]
        found = [argument.arg for argument in functions[kernel].args.args]
        assert found[: len(wanted)] == wanted, kernel
    assert "mamba_align_fused" not in inspect.getsource(type(current_platform)), "vLLM has its own"


def test_supported_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are refused with both versions and the way out, before anything is wrapped."""
    supported = ("0.32.0", "0.32.0+cpu", "0.32.1.post1", "0.32.2rc1", "0.33.0+cpu", "0.33.1")
    for version in (vllm.__version__, *supported):
        check_vllm_version(version)
    for version in ("0.31.9", "0.34.0", "1.32.0", "0.3.2", "0.34.0rc1+cpu", "dev"):
        with pytest.raises(UnsupportedVllmError) as caught:
            check_vllm_version(version)
        for words in (
            "works with vLLM 0.32.x and 0.33.x",
            f"{version} is installed",
            "install vllm==0.32.* or vllm==0.33.*",
            "uninstall vllm-tgvkv",
        ):
            assert words in str(caught.value)
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setattr(patches, "install_flags", lambda: pytest.fail("it wrapped"))
    with pytest.raises(UnsupportedVllmError):
        register()
