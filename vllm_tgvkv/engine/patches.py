# SPDX-License-Identifier: Apache-2.0
"""The functions and the class of vLLM that this plugin wraps or replaces, because vLLM has no hook for them.

| function | why | can go when |
|---|---|---|
| `EngineArgs.add_cli_args` | a general plugin cannot add flags to `vllm serve` | vLLM lets plugins add an argument group |
| `EngineArgs.from_cli_args` | the flags must reach `additional_config` | the same |
| `EngineArgs.create_engine_config` | `additional_config` must choose scheduler and worker, and refuse what is unsupported before a model loads; no hook sees both | vLLM offers a config hook to general plugins |
| `loggers.PrometheusStatLogger` (replaced by a subclass) | only stat logger plugins can add an engine's own numbers to `/metrics`, and installing one turns `--disable-log-stats` off for every engine | such a plugin may decline |
| `InputProcessor.process_inputs` | a wrong `vllm_xargs` value must become HTTP 400 in the server process, and the number of protected tokens reaches the engine among them | vLLM lets plugins validate request parameters |
| `BaseRenderer.render_chat` | only here are both messages and tokens known, so that instructions can be told from what they are about | vLLM says where each message of a prompt begins |
| `BaseRenderer.render_chat_async` | the same, for the server | the same |
| `BaseServing._check_model` | a stream has begun, and a new image is in the cache, when `process_inputs` is called; beside `vllm_xargs` an option would be ignored | vLLM validates parameters before it renders a prompt |
| `AnthropicServingMessages.create_messages` | its model of a request drops options beside `vllm_xargs`, which stand in the body only | the same |
| `OpenAIServingChat.chat_completion_stream_generator` | the events of a stream have no place for a report | they carry `kv_transfer_params` |
| `OpenAIServingCompletion.completion_stream_generator` | the same | the same |
| `RequestOutput.add` | of several choices' results that a stream takes together, the last one's `kv_transfer_params` replace the others' | each choice has its own |
| `rejection_sampler.expand_batch_to_tokens` (replaced by a function of `worker/cpu.py`) | on CPU it loses numbers that are not int64, among them the temperatures and top k of requests with drafts | vLLM's `_expand_kernel_impl` returns them, which a test in `tests/unit/test_patches.py` notices |
| `gdn_attention._spec_forward` (replaced by a function of `worker/cpu_states.py`) | on CPU it misplaces the convolutions' inputs of a row with fewer drafts than the server makes | vLLM places them by the row's own tokens |
| `InputBatch.add_request` and `remove_request` of an engine with states | a request that is left out of a step loses the number of its accepted tokens | vLLM keeps it |

The first three are wrapped when the plugin loads, and pass everything through unless eviction is
switched on. The others are wrapped when it is: from `BaseServing._check_model` to `RequestOutput.add`
in servers only, the last three in CPU workers with drafts. `tests/unit/test_patches.py` fails when
one of them changes its signature.
"""  # noqa: E501

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_tgvkv.config.defaults import Defaults
from vllm_tgvkv.config.request import (
    PROTECT,
    PROTECTED_TOKENS,
    RequestOptions,
    is_meant_for_us,
)
from vllm_tgvkv.config.server import (
    CONFIG_KEY,
    NONE,
    EvictionConfig,
    carry,
    config_of,
    read_config_file,
)
from vllm_tgvkv.config.settings import help_lines, settings_of
from vllm_tgvkv.engine.compatibility import (
    check_engine_args,
    check_vllm_config,
    clear_nominal_window,
)
from vllm_tgvkv.engine.instructions import Instructions
from vllm_tgvkv.policies import method_names
from vllm_tgvkv.shared import connector
from vllm_tgvkv.shared.errors import EvictionConfigError

if TYPE_CHECKING:
    from fastapi import Request
    from vllm.config import VllmConfig
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.serve.engine.serving import BaseServing
    from vllm.renderers import BaseRenderer, ChatParams, TokenizeParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

logger = init_logger("vllm.tgvkv")

FLAGS = (
    "kv_eviction",
    "kv_eviction_budget",
    "kv_eviction_when",
    "kv_eviction_config",
    "kv_eviction_gates",
)
"""The flags that `vllm serve` gets, as argparse names them."""

_TRANSFER = "kv_transfer_params"
"""Name in a request's `extra_args` of what its KV connector is told."""

_READ = "_kv_eviction_read"
"""Name among the parsed arguments of what `_settings_in_flags` returned for them."""

_replacements: set[Callable[..., Any]] = set()
_defaults: WeakKeyDictionary[InputProcessor, Defaults] = WeakKeyDictionary()
"""Settings that each processor's requests are checked against, read once."""
_instructions: WeakKeyDictionary[BaseRenderer, Instructions] = WeakKeyDictionary()
"""Beginnings of prompts that each renderer has found."""

SCHEDULER_CLS = "vllm_tgvkv.scheduler.scheduler.EvictionScheduler"
ASYNC_SCHEDULER_CLS = "vllm_tgvkv.scheduler.scheduler.AsyncEvictionScheduler"


def install_flags() -> None:
    """Wrap the three functions of `EngineArgs`; a second call changes nothing."""
    _wrap(EngineArgs, "add_cli_args", _add_flags, staticmethod)
    _wrap(EngineArgs, "from_cli_args", _read_flags, classmethod)
    _wrap(EngineArgs, "create_engine_config", _configure_engine)


def install_request_handling() -> None:
    """Wrap what makes a request of messages and options; a second call changes nothing."""
    from vllm.renderers import BaseRenderer
    from vllm.v1.engine.input_processor import InputProcessor

    _wrap(InputProcessor, "process_inputs", _process_request)
    _wrap(BaseRenderer, "render_chat", _render_chat)
    _wrap(BaseRenderer, "render_chat_async", _render_chat_async)


def install_serving() -> None:
    """Wrap what requests and streams go through in a server; a second call changes nothing."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.serve.engine.serving import BaseServing
    from vllm.outputs import RequestOutput

    from vllm_tgvkv.server.streams import add_result, with_reports

    _wrap(BaseServing, "_check_model", _check_request)
    _wrap(AnthropicServingMessages, "create_messages", _check_message)
    _wrap(OpenAIServingChat, "chat_completion_stream_generator", with_reports)
    _wrap(OpenAIServingCompletion, "completion_stream_generator", with_reports)
    _wrap(RequestOutput, "add", add_result)


def install_metrics() -> None:
    """Replace vLLM's Prometheus logger by a subclass; a second call changes nothing."""
    from vllm.v1.metrics import loggers

    from vllm_tgvkv.server.prometheus import EvictionPrometheusStatLogger

    loggers.PrometheusStatLogger = EvictionPrometheusStatLogger


def _wrap(
    owner: type,
    name: str,
    wrapper: Callable[..., Any],
    binding: Callable[[Callable[..., Any]], Any] | None = None,
) -> None:
    """Replace `owner.name` by `wrapper`, whose first argument is the original function."""
    original = function_of(owner, name)
    if original in _replacements:
        return

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    _replacements.add(replacement)
    setattr(owner, name, binding(replacement) if binding else replacement)


def function_of(owner: type, name: str) -> Callable[..., Any]:
    """Return the function that a class itself defines, wrapped or not, without its binding."""
    attribute = owner.__dict__[name]
    function: Callable[..., Any] = getattr(attribute, "__func__", attribute)
    return function


def is_wrapped(owner: type, name: str) -> bool:
    """Return whether this plugin has replaced a function of a class."""
    return function_of(owner, name) in _replacements


def _add_flags(original: Callable[..., Any], parser: Any) -> Any:
    parser = original(parser)
    policy, budget, when, *others = settings_of(EvictionConfig)
    group = parser.add_argument_group(
        title="KVEviction",
        description="KV-cache eviction at the end of a prompt (vllm-tgvkv).",
    )
    check = _CheckTogether(parser)

    def add(flag: str, help: str, **options: Any) -> None:
        # Suppressed, because the help page would show a default of None; argparse formats "%".
        help = help.replace("%", "%%")
        group.add_argument(
            flag, action=check.action, default=argparse.SUPPRESS, help=help, **options
        )

    add(
        "--kv-eviction",
        f"{policy.help} It may also be a mix that --kv-eviction-config names. "
        f"Default: {policy.default_text}.",
        metavar=f"{{{','.join((NONE, *method_names()))}}}",
    )
    add(
        "--kv-eviction-budget",
        f"{budget.help} Default: {budget.default_text}. A request can override it "
        'with `vllm_xargs: {"kv_eviction_budget": 0.2}`.',
    )
    add(
        "--kv-eviction-when",
        f"{when.help} Default: {when.default_text}. A request can override it with "
        '`vllm_xargs: {"kv_eviction_when": "always"}`.',
        metavar=f"{{{','.join(when.choices)}}}",
    )
    add(
        "--kv-eviction-config",
        "Everything else, as a YAML or JSON file or inline JSON:\n\n" + help_lines(others),
        type=_config_flag,
    )
    add(
        "--kv-eviction-gates",
        "Folder of the model's gates, for the methods trimkv, dbtrimkv and kvzap; short for "
        "`gates` in --kv-eviction-config.",
        metavar="FOLDER",
    )
    # Nobody can give it: vLLM's parser replaces the underscores of flags.
    group.add_argument(
        "--_kv_eviction_checked", type=check, default="checked", help=argparse.SUPPRESS
    )
    return parser


class _CheckTogether:
    """Reads the flags together, as the type of one more that nobody gives.

    argparse converts a default that is text, such as the last one's, once all arguments are parsed.
    It does not show a type the other arguments; the actions of the flags keep them for it.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser
        self._parsed: Callable[[], argparse.Namespace | None] = lambda: None
        """Returns the arguments that are being parsed, if one of the flags is among them."""

        class Action(argparse.Action):
            """Stores a value, as argparse's own action does."""

            def __call__(
                this, parser: Any, namespace: argparse.Namespace, values: Any, *_: Any
            ) -> None:
                setattr(namespace, this.dest, values)
                # Weak, so that arguments whose parsing failed are not checked at the next one.
                self._parsed = ref(namespace)

        self.action = Action

    def __call__(self, text: str) -> str:
        """Return the default, or end the program with one line if the flags are wrong."""
        parsed, self._parsed = self._parsed(), lambda: None
        if parsed is not None:
            try:
                setattr(parsed, _READ, _settings_in_flags(vars(parsed)))
            except EvictionConfigError as error:
                self.parser.error(_with_flag(str(error), vars(parsed)))
        return text


def _with_flag(message: str, flags: Mapping[str, Any]) -> str:
    """Begin the message about a field with the flag that gave it, as argparse's messages do."""
    field = message.partition(" ")[0].removeprefix("kv_eviction.")
    for name in (field, "config"):
        if message.startswith("kv_eviction") and f"kv_eviction_{name}" in flags:
            return f"argument --kv-eviction-{name}: {message}"
    return message


def _config_flag(value: str) -> dict[str, Any]:
    try:
        return read_config_file(value)
    except EvictionConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _read_flags(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    flags = vars(args)
    found = _settings_in_flags(flags)
    engine_args = original(cls, args)
    if found is None:
        return engine_args
    engine_args.additional_config = {**engine_args.additional_config, CONFIG_KEY: carry(*found)}
    # With --api-server-count other processes read the arguments before they load any plugin:
    # `additional_config` has to hold everything.
    args.additional_config = engine_args.additional_config
    for flag in (*FLAGS, _READ):
        flags.pop(flag, None)
    return engine_args


def _settings_in_flags(flags: Mapping[str, Any]) -> tuple[dict[str, Any], EvictionConfig] | None:
    """Return the settings that parsed flags give, as a mapping and read; None if no flag is given.

    Raises:
        EvictionConfigError: naming the flag, its value and what it may be.
    """
    fields = {"policy": "", "budget": "_budget", "when": "_when"}
    named = {name: flags.get(f"kv_eviction{suffix}") for name, suffix in fields.items()}
    if (gates := flags.get("kv_eviction_gates")) is not None:
        named["gates"] = os.path.abspath(gates)
    given = {name: value for name, value in named.items() if value is not None}
    extra = flags.get("kv_eviction_config")
    if not given and extra is None:
        return None
    if CONFIG_KEY in (flags.get("additional_config") or {}):
        raise EvictionConfigError(
            f"--kv-eviction* and --additional-config with {CONFIG_KEY!r} are both given: use one"
        )
    values = {**(extra or {}), **given}
    if "policy" not in values:
        raise EvictionConfigError(
            "--kv-eviction-budget, --kv-eviction-when, --kv-eviction-config or --kv-eviction-gates "
            "is given without --kv-eviction: name a method, such as --kv-eviction reach"
        )
    before: tuple[dict[str, Any], EvictionConfig] | None = flags.get(_READ)
    if before is not None and before[0] == values:  # else a program has changed the arguments
        return before
    return values, EvictionConfig.from_mapping(values, "--kv-eviction")


def _configure_engine(
    original: Callable[..., VllmConfig],
    engine_args: EngineArgs,
    usage_context: UsageContext | None = None,
    *args: Any,
    **kwargs: Any,
) -> VllmConfig:
    serves = usage_context is UsageContext.OPENAI_API_SERVER
    try:
        vllm_config = _evicting_config(original, engine_args, usage_context, *args, **kwargs)
    except EvictionConfigError as error:
        if not serves:
            raise
        # The log shows what this process has done so far; a traceback would hide the reason.
        print(f"vllm serve: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if serves and config_of(vllm_config).active:
        install_serving()
        if envs.VLLM_PLUGINS is None:
            logger.warning(
                "Without the routes below /kv-eviction and the inspector: to have them, start the "
                "server with VLLM_PLUGINS=tgvkv, and with the names of other plugins that it needs"
            )
    return vllm_config


def _evicting_config(
    original: Callable[..., VllmConfig], engine_args: EngineArgs, *args: Any, **kwargs: Any
) -> VllmConfig:
    config = config_of(engine_args)
    if not config.active:
        return original(engine_args, *args, **kwargs)

    platform = check_engine_args(engine_args)
    engine_args.worker_cls = platform.worker_cls
    is_named = engine_args.attention_backend or engine_args.attention_config.backend
    if not platform.has_other_backends and is_named is None:
        # Else vLLM names a CUDA backend for Gemma 4, which its CPU platform ignores.
        engine_args.attention_backend = AttentionBackendEnum[platform.attention_backend]
    vllm_config = original(engine_args, *args, **kwargs)
    carried = carry(vllm_config.additional_config[CONFIG_KEY], config)
    vllm_config.additional_config = {**vllm_config.additional_config, CONFIG_KEY: carried}
    check_vllm_config(vllm_config, platform)
    clear_nominal_window(vllm_config)
    if vllm_config.kv_transfer_config is not None:
        vllm_config.kv_transfer_config.kv_connector_module_path = connector.MODULE
    # vLLM has decided by now whether steps are scheduled ahead, and whether the user named an
    # attention backend.
    scheduler = vllm_config.scheduler_config
    scheduler.scheduler_cls = ASYNC_SCHEDULER_CLS if scheduler.async_scheduling else SCHEDULER_CLS
    vllm_config.attention_config.backend = AttentionBackendEnum[platform.attention_backend]
    install_request_handling()
    install_metrics()
    return vllm_config


def _process_request(
    original: Callable[..., EngineCoreRequest],
    processor: InputProcessor,
    request_id: str,
    prompt: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> EngineCoreRequest:
    defaults = _defaults_of(processor)
    if not (defaults.config.active and isinstance(params, SamplingParams)):
        return original(processor, request_id, prompt, params, *args, **kwargs)
    given = params.extra_args or {}
    _refuse_wrong_options(processor, given)
    # A refused request has cached no image yet, which the engine would miss in the next one.
    request = original(processor, request_id, prompt, params, *args, **kwargs)
    if params.n > 1 and _TRANSFER in given:
        # Several answers to a prompt would begin with the same tokens, and the first one that has
        # read the blocks gives them back.
        assert request.sampling_params is not None
        given = {name: value for name, value in given.items() if name != _TRANSFER}
        request.sampling_params.extra_args = given
    is_wanted = given.get(PROTECT, defaults.config.protect) == "system"
    if is_wanted and isinstance(prompt, dict) and PROTECTED_TOKENS in prompt:
        assert request.sampling_params is not None
        request.sampling_params.extra_args = {PROTECTED_TOKENS: prompt[PROTECTED_TOKENS], **given}
    return request


async def _check_request(original: Callable[..., Any], serving: BaseServing, request: Any) -> Any:
    """Refuse wrong options, and those beside `vllm_xargs`, before a prompt is rendered."""
    error = await original(serving, request)
    processor = getattr(serving, "input_processor", None)
    if error is None and processor is not None and _defaults_of(processor).config.active:
        _refuse_beside(getattr(request, "model_extra", None) or ())
        _refuse_wrong_options(processor, getattr(request, "vllm_xargs", None) or {})
    return error


async def _check_message(
    original: Callable[..., Any],
    serving: AnthropicServingMessages,
    request: Any,
    raw_request: Request | None = None,
) -> Any:
    if raw_request is not None and _defaults_of(serving.input_processor).config.active:
        _refuse_beside(await raw_request.json())  # which FastAPI has read and keeps
    return await original(serving, request, raw_request)


def _refuse_beside(body: Iterable[str]) -> None:
    """Raise `VLLMValidationError` for an option beside `vllm_xargs`, where nothing reads it."""
    for key in filter(is_meant_for_us, body):
        message = f"{key} is at the top level of the request's body: put it into vllm_xargs"
        raise VLLMValidationError(message, parameter=key)


def _defaults_of(processor: InputProcessor) -> Defaults:
    # Read once: checking the settings takes too long to do for every request.
    if processor not in _defaults:
        _defaults[processor] = Defaults(config_of(processor.vllm_config))
    return _defaults[processor]


def _refuse_wrong_options(processor: InputProcessor, given: Mapping[str, Any]) -> None:
    """Raise `VLLMValidationError` if a request's options are wrong."""
    if not isinstance(transfer := given.get(_TRANSFER), dict | None):
        # It may come in `vllm_xargs`; a connector of vLLM would end the engine.
        message = f"{_TRANSFER} must be an object, got {transfer!r}"
        raise VLLMValidationError(message, parameter=_TRANSFER)
    try:
        block_size = processor.vllm_config.cache_config.block_size
        RequestOptions.resolve(_defaults_of(processor).current(), given, block_size)
    except EvictionConfigError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from error


def _render_chat(
    original: Callable[..., Any],
    renderer: BaseRenderer,
    conversations: Any,
    chat_params: ChatParams,
    tok_params: TokenizeParams | None = None,
    **kwargs: Any,
) -> Any:
    rendered = original(renderer, conversations, chat_params, tok_params, **kwargs)
    known = _instructions_of(renderer)
    for chat in known.new_chats(conversations, chat_params, tok_params, rendered[1]):
        with known.learning(chat):
            _, chat.probed = original(
                renderer, chat.probes, chat_params, tok_params, skip_mm_cache=True
            )
    return rendered


async def _render_chat_async(
    original: Callable[..., Any],
    renderer: BaseRenderer,
    conversations: Any,
    chat_params: ChatParams,
    tok_params: TokenizeParams | None = None,
    **kwargs: Any,
) -> Any:
    rendered = await original(renderer, conversations, chat_params, tok_params, **kwargs)
    known = _instructions_of(renderer)
    for chat in known.new_chats(conversations, chat_params, tok_params, rendered[1]):
        with known.learning(chat):
            _, chat.probed = await original(
                renderer, chat.probes, chat_params, tok_params, skip_mm_cache=True
            )
    return rendered


def _instructions_of(renderer: BaseRenderer) -> Instructions:
    if renderer not in _instructions:
        _instructions[renderer] = Instructions(config_of(renderer.config).active)
    return _instructions[renderer]
