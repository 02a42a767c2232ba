"""What the ``torchrec`` engine's options mean for its tables: refusals, and where each table lies."""

from collections.abc import Sequence

from gem_core.spec import MachineError, RequestError, SparseOptimizer, TableSpec
from gem_parallel.sparse.options import TorchRecOptions
from gem_parallel.sparse.placement import BY_HOST, Cluster, Place, check_layout, place, wishes
from gem_parallel.sparse.planfile import read_plan


def check_fit(tables: Sequence[TableSpec], optimizer: SparseOptimizer, device: str, options: TorchRecOptions) -> None:
    """What fbgemm itself would refuse with an assertion, or only once it runs.

    Raises:
        RequestError: a width is no multiple of 4.
        MachineError: the device has no kernels for the optimiser, the rows' format or their memory.
    """
    narrow = [f"{table.name!r} ({table.dim})" for table in tables if table.dim % 4]
    if narrow:
        so = f"the width of {', '.join(narrow)} is no multiple of 4"
        raise RequestError("engine 'torchrec'", so, "Choose widths that are multiples of 4, or --set embedding.engine=torch.")
    if options.dtype == "bf16":
        raise MachineError("engine 'torchrec' with dtype 'bf16'", "fbgemm 1.6 and 1.8 look up no bf16 rows", "Use dtype fp16 or fp32.")
    if device != "cpu":
        return
    if optimizer.name == "adam":
        so = "fbgemm has no Adam on the CPU"
        raise MachineError("engine 'torchrec' with optimiser 'adam'", so, "Use optimiser rowwise_adagrad or sgd, engine 'torch', or a GPU.")
    for _, memory in wishes(tables, options.sharding, options.memory, options.tables).values():
        check_memory(memory, device)


def check_memory(memory: str, device: str) -> None:
    """Raise MachineError for ``uvm`` and ``uvm_cached`` without a GPU."""
    if memory != "device" and device == "cpu":
        so = "there is no GPU that could read host memory"
        raise MachineError(f"engine 'torchrec' with memory {memory!r} on the CPU", so, "Use memory = 'device', or a GPU.")


def lay_out(tables: Sequence[TableSpec], optimizer: SparseOptimizer, cluster: Cluster, options: TorchRecOptions) -> dict[str, Place]:
    """Where each table lies within one group of ranks; empty in a single process without a plan.

    Raises:
        RequestError: a layout or a combination of options does not work here, the plan file does not fit, or torchrec's planner is asked for without
            a plan file.
    """
    wanted = wishes(tables, options.sharding, options.memory, options.tables)
    if options.replicas > 1 and options.dtype != "fp32":
        so = "the average of copies is rounded to the nearest, which loses small updates"
        raise RequestError(f"replicas = {options.replicas} with dtype {options.dtype!r}", so, "Choose dtype = 'fp32', or replicas = 1.")
    if options.plan is not None:
        places = read_plan(options.plan, tables, cluster)
    elif cluster.world * options.replicas == 1:
        return {}
    elif options.sharding == "planner":
        so = "it needs facts of the batches and of the machine that a run does not have before it starts"
        raise RequestError("sharding 'planner'", so, "Write a plan with `gem plan --write FILE` and name it in embedding.options.plan.")
    else:
        places = place(tables, wanted, optimizer, cluster)
    for table in tables:
        check_layout(table, places[table.name].sharding, optimizer, cluster)
        check_memory(places[table.name].memory, cluster.device)
        _check_mix(table, places[table.name], options)
    return places


def _check_mix(table: TableSpec, placed: Place, options: TorchRecOptions) -> None:
    asked = f"sharding {placed.sharding!r} for table {table.name!r}"
    if placed.sharding == "data_parallel" and (options.dtype != "fp32" or placed.memory != "device"):
        so = "copies lie in plain float32 tensors of the device"
        raise RequestError(asked, so, "Choose table_wise or row_wise for it, or dtype = 'fp32' and memory = 'device'.")
    if placed.sharding in BY_HOST and options.replicas > 1:
        so = "neighbouring ranks of a host hold copies then, and a host's ranks are no longer one group"
        raise RequestError(f"{asked} with replicas = {options.replicas}", so, "Choose row_wise for it, or replicas = 1.")
