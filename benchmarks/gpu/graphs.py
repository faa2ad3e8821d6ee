"""A runner with its decode steps recorded, on a GPU as CUDA graphs, and without."""

from collections.abc import Callable

from executor_svc.loaded import LoadedModel
from executor_svc.model.decode_graphs import DecodeGraphs
from executor_svc.model.runner import ModelRunner


def runner_of(loaded: LoadedModel) -> ModelRunner:
    if not isinstance(loaded.runner, ModelRunner):
        raise TypeError(f"the runner is a {type(loaded.runner).__name__}, not a model's")
    return loaded.runner


def recorded_graphs(loaded: LoadedModel) -> DecodeGraphs:
    """Those that the loader has recorded; on a CPU, where nothing can be recorded, the same steps done anew.

    Raises RuntimeError where a GPU's loader went without.
    """
    runner, facts = runner_of(loaded), loaded.facts
    if runner.graphs is not None:
        return runner.graphs
    if runner.forward.device.type != "cpu":
        raise RuntimeError("the model is served without CUDA graphs; the executor's log says why")
    runner.record_graphs(_done_anew, table_width=-(-facts.max_model_len // facts.block_size))
    graphs, runner.graphs = runner.graphs, None
    if graphs is None:
        raise RuntimeError("nothing was recorded")
    return graphs


def _done_anew(work: Callable[[], None]) -> Callable[[], None]:
    work()
    return work
