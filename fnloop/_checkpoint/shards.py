"""What each process writes of tensors that not every process has, and where the parts are.

The index of a checkpoint has an entry for each tensor of such a group, by the names of both:

    {"shape": [4, 6], "dtype": "float32", "dim": 0, "shards": [
        {"file": "model-00001-of-00002.safetensors", "key": "w", "offsets": [0, 0]},
        {"file": "model-00002-of-00002.safetensors", "key": "w", "offsets": [2, 0]}]}

The shards, one after the other along the dimension ``dim``, are the tensor. A tensor that is not
split has one shard, in the file of any process, and no ``dim``. A tensor without elements may have
none. So safetensors alone can read a checkpoint: load the files, and concatenate (``torch.cat``)
what the index names.

Tensors that are one in memory, such as tied weights, have the same shards.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor

from fnloop._backend.collectives import counts_here, gather_from_all
from fnloop._backend.fsdp import extent_in, full, local_part, split_dim
from fnloop._backend.launch import Backend
from fnloop._checkpoint.format import SHARDED_FORMAT, Contents, name_of_share
from fnloop._core.serialize import Json

__all__ = ["keep_own_share"]


def keep_own_share(
    contents: Contents, backend: Backend, local: Mapping[str, bool] | None = None
) -> Contents:
    """Return what this process writes of contents, with an index if several processes write.

    Every process must call it. The main process gets the whole index.

    Args:
        contents: what this process has.
        backend: where it runs.
        local: name to whether this process writes it, for tensors of optimizers that not all
            processes have. The main process writes the others that are whole.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    index: dict[str, Json] = {}
    for group, tensors in contents.groups().items():
        own = local if group == "optimizer" and local else {}
        if own or any(split_dim(tensor) is not None for tensor in tensors.values()):
            file = name_of_share(group, backend.rank, backend.world_size)
            groups[group], index[group] = _share_of(tensors, file, backend.main, own)
        else:
            whole = {name: full(tensor) for name, tensor in tensors.items()}
            groups[group] = whole if backend.main else {}
    kept = contents.with_groups(groups)
    if not index:
        return kept
    version = max(SHARDED_FORMAT, contents.facts["format_version"])
    facts = {**contents.facts, "format_version": version}
    for theirs in gather_from_all(index)[1:]:
        for group, entries in theirs.items():
            for name, entry in entries.items():
                mine = index[group].get(name)
                if mine is None or not mine["shards"]:
                    index[group][name] = entry
                else:
                    mine["shards"] += entry["shards"]
    return attrs.evolve(
        kept, facts=facts, index=index, rank=backend.rank, processes=backend.world_size
    )


def _share_of(
    tensors: Mapping[str, Tensor], file: str, main: bool, local: Mapping[str, bool]
) -> tuple[dict[str, Tensor], dict[str, Json]]:
    """Return what this process writes of a group of tensors, and the index of that.

    Args:
        tensors: the group.
        file: the name of the file to write.
        main: whether this is the main process, which writes what is not split.
        local: name to whether this process writes it, where that is another rule.
    """
    mine: dict[str, Tensor] = {}
    entries: dict[str, Json] = {}
    keys: dict[object, str] = {}
    for name, tensor in tensors.items():
        dim, offsets = split_dim(tensor), [0] * tensor.ndim
        entry: dict[str, Json] = {
            "shape": [*tensor.shape],
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        if dim is None:
            own, writes = full(tensor), local.get(name, main)
        else:
            own, entry["dim"] = local_part(tensor).detach(), dim
            offsets[dim], stop, first = extent_in(tensor, tensor.shape[dim])
            writes = first and counts_here()
            if own.shape[dim] != stop - offsets[dim]:
                raise TypeError(
                    f"{name} is split over processes in another way than by fully_shard: this "
                    f"process has {own.shape[dim]} of {tensor.shape[dim]} along dimension {dim}"
                )
        entry["shards"] = []
        if writes and (own.numel() or dim is None):
            kind = (own.dtype, own.is_conj(), own.is_neg())
            place = (own.data_ptr() or name, own.shape, own.stride(), *kind)
            key = keys.setdefault(place, name)
            mine[key] = own
            entry["shards"].append({"file": file, "key": key, "offsets": offsets})
        entries[name] = entry
    return mine, entries
