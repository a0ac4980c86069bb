"""From `ServerArgs` to `RuntimeConfig`: chooses and logs options that are not given, and refuses options without effect."""

from __future__ import annotations

from runtime.config.cache import check_cache, check_pool, least_tokens, resolve_cache
from runtime.config.device import check_device, resolve_device
from runtime.config.graphs import resolve_graphs
from runtime.config.machine import MachineFacts
from runtime.config.model_facts import DraftFacts, ModelFacts
from runtime.config.parallel import check_parallel, resolve_parallel
from runtime.config.refusals import check_bounds
from runtime.config.runtime_config import RuntimeConfig
from runtime.config.scheduler import check_scheduler, resolve_scheduler
from runtime.config.served_model import check_model, resolve_served_model
from runtime.config.server import check_server, resolve_server
from runtime.config.server_args import ServerArgs
from runtime.config.speculative import asks_for_embedded_draft, check_draft, check_speculative, resolve_speculative
from runtime.config.speculative_tuning import SpeculativeTuning


def resolve(
    args: ServerArgs, machine: MachineFacts, model: ModelFacts, draft: DraftFacts | None = None, tuning: SpeculativeTuning | None = None
) -> RuntimeConfig:
    """Choose every option that is not given, and check every option that is.

    Args:
        args: the flags.
        machine: the machine to run on.
        model: the model to run.
        draft: the draft model, if there is one.
        tuning: the contents of --speculative-tuning.

    Raises:
        ConfigError: an option is invalid or cannot take effect; the message says what to do.
    """
    check(args)
    check_draft(args)
    device = resolve_device(args, machine, model)
    served = resolve_served_model(args, device, model)
    graphs = resolve_graphs(args, device)
    captures = bool(graphs.cuda_graph_bs)
    speculative = resolve_speculative(args, device, served.quantization, captures, machine, model, draft, tuning)
    cache = resolve_cache(args, device.attention_backend, served.context_length, model.head_dim, recurrent=model.recurrent)
    if cache.max_total_tokens is not None:
        beyond = 1 if speculative is None else speculative.tokens_per_step
        check_pool(cache.max_total_tokens, least_tokens(served.context_length, beyond, cache.page_size), cache.page_size)
    return RuntimeConfig(
        model=served,
        device=device,
        cache=cache,
        scheduler=resolve_scheduler(args, device, served.context_length, speculative, sparse=model.sparse),
        graphs=graphs,
        parallel=resolve_parallel(args, device, machine),
        speculative=speculative,
        server=resolve_server(args, served.context_length),
    )


def check(args: ServerArgs) -> None:
    """Raise `ConfigError` for options that are invalid for any machine and model, before anything is fetched or loaded."""
    check_speculative(args)
    check_bounds(args)
    check_model(args)
    check_device(args)
    check_parallel(args)
    check_cache(args)
    check_scheduler(args)
    check_server(args)
    # Without a model path the embedded model is served, and `with_embedded_draft` fills in its draft.
    if args.model_path is not None or not asks_for_embedded_draft(args):
        check_draft(args)
