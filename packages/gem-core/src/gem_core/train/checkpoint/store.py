"""Tensors in files, written and read through torch.distributed.checkpoint.

Each rank writes files ``tensors-RANK-NUMBER.safetensors`` in the safetensors format, several at a time, and hashes what it writes. ``tensors.json``
says which file holds which box of which tensor. Nothing is pickled, and a reader maps the files and touches only the rows it wants.
"""

import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from gem_core.spec import RunFailed
from gem_core.train.checkpoint.pieces import box

INDEX = "tensors.json"
KEPT = "Nothing was written; the checkpoint before it is kept."
FILE_BYTES = 128 << 20
THREADS = min(8, 2 * (os.cpu_count() or 1))
"""Files at a time: while some wait for the disk, others are hashed."""
_BLOCK = 1 << 20
"""Bytes that stay in the cache of a core while they are checked, hashed and written; a longer block would come from memory three times."""
_NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The safetensors names of dtypes."""
DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A written file: its name, SHA-256 in hexadecimal digits, and bytes."""

    name: str
    sha256: str
    size: int


Shapes = Mapping[str, tuple[torch.dtype, Sequence[int]]]
Finish = Callable[[Mapping[str, Any], Sequence[FileFacts]], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a box of a tensor lies: the file, the first byte in it, and its shape."""

    file: FileFacts
    begin: int
    sizes: tuple[int, ...]


def write_safetensors(path: Path, shapes: Shapes, load: Callable[[str], Tensor]) -> tuple[FileFacts, dict[str, int]]:
    """Write tensors and flush them to disk; return the file's facts and the first byte of each tensor.

    Args:
        shapes: dtype and shape by name, widest dtype first, so that each tensor is aligned.
        load: gives the tensor of a name; asked for one at a time.

    Raises:
        RunFailed: a value is not finite; the tensor is named.
    """
    end, header = 0, dict[str, Any]()
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for block in (len(text).to_bytes(8, "little"), text):
            digest.update(block)
            file.write(block)
        for name in shapes:
            _write(file, digest, name, load(name).detach().cpu())
        os.fsync(file.fileno())
    data = 8 + len(text)
    return FileFacts(path.name, digest.hexdigest(), data + end), {name: data + entry["data_offsets"][0] for name, entry in header.items()}


def _write(file: Any, digest: Any, name: str, tensor: Tensor) -> None:
    """Check, hash and write a block at a time, so that a block comes from memory once and from the processor's cache after that."""
    for part in torch.split(tensor.contiguous().view(-1), _BLOCK // tensor.element_size()):
        _refuse_non_finite(name, part)
        block = _bytes_of(part)
        digest.update(block)
        while block:
            block = block[file.write(block) :]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _refuse_non_finite(key: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and tensor.numel():
        low, high = torch.aminmax(tensor if tensor.element_size() > 1 else tensor.float())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise RunFailed("a checkpoint", f"{key.split('@')[0]} holds a value that is not finite", KEPT)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Writer(StorageWriter):
    """Writes the pieces of a rank.

    Args:
        folder: where the files go.
        rank: of this process.
        begin: called on the first rank before any rank writes.
        finish: called on the first rank with the index and the files of all ranks, when all are on disk.
    """

    def __init__(self, folder: Path, rank: int, *, begin: Callable[[], None], finish: Finish) -> None:
        self._folder, self._rank, self._begin, self._finish = folder, rank, begin, finish

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between checkpoints."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self._begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        groups = _in_files(plan.items)
        with ThreadPoolExecutor(THREADS) as pool:
            written = list(pool.map(lambda n: self._write_file(n, groups[n], planner), range(len(groups))))
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for results in written for result in results])
        return future

    def _write_file(self, number: int, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        by_key = {_key(item): item for item in items}

        def load(key: str) -> Tensor:
            tensor = planner.resolve_data(by_key[key])
            assert isinstance(tensor, Tensor)
            return tensor

        boxes = {key: _data(item) for key, item in by_key.items()}
        shapes = {key: (data.properties.dtype, data.chunk.sizes) for key, data in boxes.items()}
        file, begins = write_safetensors(self._folder / f"tensors-{self._rank}-{number}.safetensors", shapes, load)
        return [
            WriteResult(index=item.index, size_in_bytes=_bytes(item), storage_data=Place(file, begins[key], tuple(boxes[key].chunk.sizes)))
            for key, item in by_key.items()
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        index: dict[str, Any] = {}
        for name, saved in metadata.state_dict_metadata.items():
            assert isinstance(saved, TensorStorageMetadata)
            index[name] = {"dtype": _NAMES[saved.properties.dtype], "shape": list(saved.size), "pieces": []}
        files: dict[str, FileFacts] = {}
        for result in (result for of_rank in results for result in of_rank):
            place: Place = result.storage_data
            files[place.file.name] = place.file
            piece = {"file": place.file.name, "begin": place.begin, "offsets": list(result.index.offset or ()), "sizes": list(place.sizes)}
            index[result.index.fqn]["pieces"].append(piece)
        for name, entry in index.items():
            there = sum(math.prod(piece["sizes"]) for piece in entry["pieces"])
            if there != math.prod(entry["shape"]):
                so = f"the ranks hold {there} of the {math.prod(entry['shape'])} values of {name}"
                raise RunFailed("a checkpoint", so, KEPT)
        self._finish(index, [files[name] for name in sorted(files)])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def storage_meta(self) -> StorageMeta | None:
        return None


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _bytes(item: WriteItem) -> int:
    return _data(item).properties.dtype.itemsize * math.prod(_data(item).chunk.sizes)


def _key(item: WriteItem) -> str:
    """The tensor's name, and after an @ where the box begins if it is not the whole."""
    data = _data(item)
    return item.index.fqn if data.chunk.sizes == data.size else f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"


def _in_files(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Items in files of about ``FILE_BYTES``, widest dtype first."""
    groups: list[list[WriteItem]] = []
    room = 0
    for item in sorted(items, key=lambda item: -_data(item).properties.dtype.itemsize):
        if not groups or room <= 0:
            groups.append([])
            room = FILE_BYTES
        groups[-1].append(item)
        room -= _bytes(item)
    return groups


class Reader(StorageReader):
    """Fills pieces from the files of a checkpoint folder.

    Args:
        folder: the checkpoint.
        index: the content of ``tensors.json``.
    """

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self._folder, self._index = folder, index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between readings."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, Any] = {}
        for name, entry in self._index.items():
            chunks = [ChunkStorageMetadata(torch.Size(piece["offsets"]), torch.Size(piece["sizes"])) for piece in entry["pieces"]]
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry["dtype"]]), torch.Size(entry["shape"]), chunks)
            places |= {MetadataIndex(name, piece["offsets"]): piece for piece in entry["pieces"]}
        return Metadata(tensors, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(self._places[item.storage_index]["file"], []).append(item)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda name: self._read_file(name, wanted[name], planner), wanted))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @torch.no_grad()
    def _read_file(self, name: str, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        with (self._folder / name).open("rb", buffering=0) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
            for item in items:
                place, dtype = self._places[item.storage_index], DTYPES[self._index[item.storage_index.fqn]["dtype"]]
                target, width = planner.resolve_tensor(item), list(place["sizes"][1:])
                if target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous() and list(item.lengths[1:]) == width:
                    first = item.storage_offsets[0] if item.storage_offsets else 0
                    _read(file, place["begin"] + first * dtype.itemsize * math.prod(width), target)
                    continue
                saved = torch.frombuffer(content, dtype=dtype, count=math.prod(place["sizes"]), offset=place["begin"]).view(place["sizes"])
                target.copy_(box(saved, item.storage_offsets, item.lengths))
                del saved  # a map cannot be closed while a tensor looks into it

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _read(file: Any, begin: int, target: Tensor) -> None:
    """Whole rows straight into their place."""
    file.seek(begin)
    content = _bytes_of(target)
    while content:
        got = file.readinto(content)
        if not got:
            raise RunFailed(f"file {file.name}", f"it ends {len(content)} bytes early", "Run gem checkpoint verify; use an older checkpoint.")
        content = content[got:]
