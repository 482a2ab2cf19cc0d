# SPDX-License-Identifier: Apache-2.0
"""The functions and the class of vLLM that are wrapped because vLLM has no hook there.

| function | why | can go when |
|---|---|---|
| `EngineArgs.add_cli_args` | a general plugin cannot add flags to `vllm serve` | vLLM lets plugins add an argument group |
| `EngineArgs.from_cli_args` | the flags must reach `additional_config` | the same |
| `EngineArgs.create_engine_config` | `additional_config` must choose scheduler and worker, and refuse what is unsupported before a model loads; no hook sees both | vLLM offers a config hook to general plugins |
| `loggers.PrometheusStatLogger` (replaced by a subclass) | `/metrics` has no door for an engine's own numbers but stat logger plugins, and one that is installed turns `--disable-log-stats` off for every engine | such a plugin may decline |
| `InputProcessor._validate_params` | a wrong `vllm_xargs` value must become HTTP 400 in the server process | vLLM lets plugins validate request parameters |

The first three are wrapped when the plugin loads and pass everything through
unless eviction is asked for; the others are once it is.
`tests/unit/test_patches.py` fails when one of them changes its signature.
"""  # noqa: E501

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_tgvkv.budget import Budget
from vllm_tgvkv.compatibility import check_engine_args, check_vllm_config
from vllm_tgvkv.config import (
    CONFIG_KEY,
    NONE,
    EvictionConfig,
    RequestOptions,
    config_of,
    read_config_file,
)
from vllm_tgvkv.defaults import Defaults
from vllm_tgvkv.errors import EvictionConfigError
from vllm_tgvkv.policies import POLICY_NAMES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.tgvkv")

_MARK = "_wrapped_by_vllm_tgvkv"
_DEFAULTS = "_defaults_of_vllm_tgvkv"

SCHEDULER_CLS = "vllm_tgvkv.scheduler.EvictionScheduler"
ASYNC_SCHEDULER_CLS = "vllm_tgvkv.scheduler.AsyncEvictionScheduler"


def install_flags() -> None:
    """Wrap the three functions of `EngineArgs`; calling it again changes nothing."""
    _wrap(EngineArgs, "add_cli_args", _add_flags, staticmethod)
    _wrap(EngineArgs, "from_cli_args", _read_flags, classmethod)
    _wrap(EngineArgs, "create_engine_config", _configure_engine)


def install_request_validation() -> None:
    """Wrap the check of request parameters; calling it again changes nothing."""
    from vllm.v1.engine.input_processor import InputProcessor

    _wrap(InputProcessor, "_validate_params", _validate_request)


def install_metrics() -> None:
    """Put a subclass in the place of vLLM's Prometheus logger; again changes nothing."""
    from vllm.v1.metrics import loggers

    from vllm_tgvkv.server.prometheus import EvictionPrometheusStatLogger

    loggers.PrometheusStatLogger = EvictionPrometheusStatLogger


def _wrap(
    owner: type,
    name: str,
    wrapper: Callable[..., Any],
    binding: Callable[[Callable[..., Any]], Any] | None = None,
) -> None:
    """Replace `owner.name` by `wrapper`, which gets the original function first."""
    original = owner.__dict__[name]
    function = getattr(original, "__func__", original)
    if hasattr(function, _MARK):
        return

    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    setattr(replacement, _MARK, True)
    setattr(owner, name, binding(replacement) if binding else replacement)


def _add_flags(original: Callable[..., Any], parser: Any) -> Any:
    parser = original(parser)
    group = parser.add_argument_group(
        title="KVEviction",
        description="KV-cache eviction at the end of a prompt (vllm-tgvkv).",
    )
    # Absent flags leave no attribute: the help page would call None their default.
    group.add_argument(
        "--kv-eviction",
        metavar=f"{{{','.join((NONE, *POLICY_NAMES))}}}",
        default=argparse.SUPPRESS,
        help="Method that decides which cache entries of a prompt are kept for decoding, or a "
        "mix that --kv-eviction-config names. Without it, or with `none`, vLLM runs as stock.",
    )
    group.add_argument(
        "--kv-eviction-budget",
        type=_budget_flag,
        default=argparse.SUPPRESS,
        help="What is kept: a fraction of the prompt, 0 < budget <= 1, a whole number of "
        "tokens per KV head, or auto:SHARE, such as auto:0.98,min=0.02,max=0.5, the smallest "
        "fraction that keeps SHARE of the attention (default: 0.1). A request can override it with "
        '`vllm_xargs: {"kv_eviction_budget": 0.2}`.',
    )
    group.add_argument(
        "--kv-eviction-config",
        type=_config_flag,
        default=argparse.SUPPRESS,
        help="Everything else, as a YAML or JSON file or inline JSON: granularity (layer, head), "
        "observation_window, sinks, floor_pages, min_prompt_tokens, text_only (keep, evict), "
        "prefix_reuse (exact, full), decode_kernel (stock, triton), metrics (true, false), "
        "max_traces, max_trace_mib, defaults_file, pooling, methods (mixes of parts of methods, "
        "by name).",
    )
    return parser


def _budget_flag(value: str) -> float | int | str:
    try:
        budget = Budget.parse(value, "the budget")
    except EvictionConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if budget.is_auto:
        return value
    return budget.tokens if budget.tokens is not None else float(value)


def _config_flag(value: str) -> dict[str, Any]:
    try:
        values = read_config_file(value)
        EvictionConfig.from_mapping(values)
    except EvictionConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return values


def _read_flags(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    engine_args = original(cls, args)
    flags = {
        "policy": getattr(args, "kv_eviction", None),
        "budget": getattr(args, "kv_eviction_budget", None),
    }
    given = {name: value for name, value in flags.items() if value is not None}
    extra = getattr(args, "kv_eviction_config", None)
    if not given and extra is None:
        return engine_args
    if CONFIG_KEY in engine_args.additional_config:
        raise EvictionConfigError(
            f"--kv-eviction* and --additional-config with {CONFIG_KEY!r} are both given: use one"
        )
    values = {**(extra or {}), **given}
    if "policy" not in values:
        raise EvictionConfigError(
            "--kv-eviction-budget or --kv-eviction-config is given without --kv-eviction: "
            f"name a method, such as --kv-eviction {POLICY_NAMES[0]}"
        )
    # What is wrong is refused before a model is looked at, a method by the name of its flag.
    settings = EvictionConfig.from_mapping({**values, "policy": NONE})
    settings.check_method(values["policy"], settings.budget, "--kv-eviction")
    EvictionConfig.from_mapping(values)
    engine_args.additional_config = {**engine_args.additional_config, CONFIG_KEY: values}
    # With --api-server-count the arguments travel to processes that read them before any
    # plugin is loaded there; what they find in `additional_config` is enough.
    args.additional_config = engine_args.additional_config
    for flag in ("kv_eviction", "kv_eviction_budget", "kv_eviction_config"):
        vars(args).pop(flag, None)
    return engine_args


def _configure_engine(
    original: Callable[..., VllmConfig], engine_args: EngineArgs, *args: Any, **kwargs: Any
) -> VllmConfig:
    additional = engine_args.additional_config
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return original(engine_args, *args, **kwargs)
    config = EvictionConfig.from_mapping(additional[CONFIG_KEY])
    if not config.active:
        return original(engine_args, *args, **kwargs)

    platform = check_engine_args(engine_args)
    engine_args.worker_cls = platform.worker_cls
    vllm_config = original(engine_args, *args, **kwargs)
    check_vllm_config(vllm_config, platform)
    # What vLLM decides last: whether steps are scheduled ahead, and where nobody asked for an
    # attention backend, which one.
    scheduler = vllm_config.scheduler_config
    scheduler.scheduler_cls = ASYNC_SCHEDULER_CLS if scheduler.async_scheduling else SCHEDULER_CLS
    vllm_config.attention_config.backend = AttentionBackendEnum[platform.attention_backend]
    install_request_validation()
    if config.metrics:
        install_metrics()
    return vllm_config


def _validate_request(
    original: Callable[..., Any], processor: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(processor, params, *args, **kwargs)
    # Read once: settings with many mixes take longer to check than a request should.
    defaults = getattr(processor, _DEFAULTS, None)
    if defaults is None:
        defaults = Defaults(config_of(processor.vllm_config))
        setattr(processor, _DEFAULTS, defaults)
    if defaults.config.active and isinstance(params, SamplingParams):
        try:
            RequestOptions.resolve(defaults.current(), params.extra_args)
        except EvictionConfigError as error:
            raise VLLMValidationError(str(error), parameter="vllm_xargs") from error
    return result
