"""Files whose headers claim more than there is are refused before memory is taken."""

import io
import lzma
import math
import resource
import struct
import types
import zipfile
import zlib

import numpy as np
import psutil
import pytest

from nlr_lab.runtime import bounds
from nlr_lab.runtime.bounds import check_room, read_array, read_arrays, read_bytes
from nlr_lab.tasks.images.sources import read_images
from refusals import assert_refused
from seeds import rng

HUGE = 1 << 40


def npy(shape, dtype="<f8", data=b"") -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue() + data


def assert_refused_cheaply(read, path, words) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_refused(words, read, path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


def test_arrays_come_back_as_they_were_saved(tmp_path):
    generator = rng()
    arrays = {
        "floats": generator.normal(size=(3, 5, 2)),
        "fortran": np.asfortranarray(generator.integers(0, 9, (4, 7))),
        "bytes": generator.integers(0, 255, 11, dtype=np.uint8),
        "words": np.array(["ab", "c"]),
        "none": np.zeros((0, 3), dtype=np.float32),
        "one": np.array(2.5),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    np.savez_compressed(tmp_path / "b.npz", **arrays)
    (tmp_path / "c.npz.xz").write_bytes(lzma.compress((tmp_path / "a.npz").read_bytes()))
    np.save(tmp_path / "d.npy", arrays["floats"])
    for name in ("a.npz", "b.npz", "c.npz.xz"):
        found = read_arrays(tmp_path / name)
        assert {key: each.dtype for key, each in found.items()} == {key: each.dtype for key, each in arrays.items()}
        assert all(np.array_equal(found[key], value) for key, value in arrays.items())
    found["floats"][0] = 0  # they are the caller's own
    np.testing.assert_array_equal(read_array(tmp_path / "d.npy"), arrays["floats"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (npy((HUGE, 3)), "readable .* file: (Failed to read all|EOF|Unable)"),
        (npy((2,), data=b"12345678"), "readable .* file: (Failed to read all|EOF)"),
        (npy((1,), dtype="|O", data=b"12345678"), "readable .* file: Object arrays cannot be loaded"),
        (npy((-5,), data=b""), "readable"),
        (b"\x93NUMPY", "readable"),
        (b"", "readable"),
        (b"not numpy at all, but long enough to look", "readable"),
    ],
)
def test_an_array_that_claims_more_than_there_is(tmp_path, content, words):
    (tmp_path / "a.npy").write_bytes(content)
    assert_refused_cheaply(read_array, tmp_path / "a.npy", words)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", content)
    assert_refused_cheaply(read_arrays, tmp_path / "a.npz", words)


def test_a_zip_that_unpacks_to_more_than_there_is_memory(tmp_path, monkeypatch):
    """A member that says it is huge is refused by what it says; nothing is unpacked."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy((8,), data=bytes(64)))
    raw = bytearray((tmp_path / "a.npz").read_bytes())
    place = raw.rindex(b"PK\x01\x02")
    raw[place + 24 : place + 28] = struct.pack("<I", 0xFFFFFFF0)  # the size that the directory states
    (tmp_path / "a.npz").write_bytes(raw)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1 << 30))
    assert_refused_cheaply(read_arrays, tmp_path / "a.npz", "of memory, and")
    (tmp_path / "b.npz").write_bytes(raw[: len(raw) // 2])
    assert_refused_cheaply(read_arrays, tmp_path / "b.npz", "not a readable .npz file")


def test_room_is_what_the_machine_has_free():
    check_room(1000, "a thing")
    assert_refused(r"^a thing takes 1,099,511,627,776,000 bytes of memory", check_room, 1000 * HUGE, "a thing")


def test_streams_stop_at_half_of_the_memory(tmp_path, monkeypatch):
    content = bytes(range(256)) * 300_000
    pieces = list(bounds.bounded(io.BytesIO(content), "it"))
    assert len(pieces) == math.ceil(len(content) / (16 << 20))
    assert b"".join(pieces) == content
    (tmp_path / "bomb.xz").write_bytes(lzma.compress(bytes(40 << 20)))
    assert (tmp_path / "bomb.xz").stat().st_size < 100_000
    assert len(read_bytes(tmp_path / "bomb.xz")) == 40 << 20
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=64 << 20))
    assert_refused("unpacks to more than 33,554,432 bytes", read_bytes, tmp_path / "bomb.xz")


def picture(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


def test_a_picture_that_claims_more_pixels_than_any_has(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat" / "a.png").write_bytes(picture(100_000, 100_000))
    images = read_images(str(tmp_path)).train
    assert_refused_cheaply(images.read, 0, "cannot read the image .*a.png.*pixels")


@pytest.mark.parametrize("form", ["ascii", "binary_little_endian"])
def test_a_mesh_that_claims_more_points_than_it_has_bytes(tmp_path, form):
    pytest.importorskip("trimesh")
    from nlr_lab.fields.mesh_files import read_mesh

    lines = ["ply", f"format {form} 1.0", f"element vertex {HUGE}", "property float x", "element face 1"]
    text = "\n".join([*lines, "property list uchar int vertex_indices", "end_header", ""])
    (tmp_path / "a.ply").write_bytes(text.encode() + bytes(40))
    assert_refused_cheaply(read_mesh, tmp_path / "a.ply", r"claims 1,099,511,627,776 of element 'vertex'")
