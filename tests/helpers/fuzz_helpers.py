"""Damaged input for everything that reads files or settings: targets, their valid examples, and how these are damaged.

Whatever is read is either taken, or refused by a UserError that says something; nothing else may be raised, hang, take
much memory or write a file. `tests/test_fuzz.py` tries hundreds of cases, `studies/faults/fuzz.py` tens of thousands.
"""

import contextlib
import gzip
import io
import json
import lzma
import math
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import trimesh
from peft import get_peft_model
from PIL import Image

import nonlinear_lowrank as nlr
from finetune_helpers import glue_folder, language_model
from nlr_lab.cli.options import parse_recipe
from nlr_lab.cli.train import TrainOptions
from nlr_lab.fields.image import read_image
from nlr_lab.fields.mesh_files import read_mesh
from nlr_lab.fields.scenes import read_scene
from nlr_lab.recipes import get_recipe
from nlr_lab.tasks.finetune.classification import read_tsv
from nlr_lab.tasks.finetune.instructions import read_examples
from nlr_lab.tasks.images.sources import read_images
from nlr_lab.tasks.text.data import Corpus
from nlr_lab.training import Arm, Recipe
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub import load_model, load_tokenizer
from nonlinear_lowrank.hub.loading import load_causal_adapter
from nonlinear_lowrank.hub.verify import verify
from nonlinear_lowrank.methods.base import all_methods, config_from_dict

SECONDS, BYTES, WAITING = 20, 512 << 20, 600
"""Limits of one case: seconds of the processor, bytes it keeps, seconds in all."""


@dataclass(frozen=True)
class Target:
    """One reader."""

    name: str
    examples: Callable[[Path], list[bytes]]
    """Valid inputs; may put files that stay as they are into the folder."""
    read: Callable[[Path, bytes], Any]
    """Function that puts the input into the folder and reads it; raises UserError."""


class Fault(AssertionError):
    """A reader did what it must not do."""


class _Late(BaseException):
    """Past the time limit. No Exception: a reader that catches those would make a refusal of it."""


def try_one(target: Target, folder: Path, data: bytes) -> bool:
    """Read one input and return whether it was taken; raise Fault."""
    process = psutil.Process()
    before, files = process.memory_info().rss, None
    try:
        with _time_limit(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            files = _files(folder)
            target.read(folder, data)
        taken = True
    except UserError as error:
        if not str(error).strip():
            raise Fault(f"{target.name}: refused without a word") from error
        taken = False
    except _Late as error:
        raise Fault(f"{target.name}: took more than {SECONDS} s of the processor, or {WAITING} s") from error
    except (Exception, RecursionError, SystemExit) as error:
        raise Fault(f"{target.name}: {type(error).__name__}: {error}") from error
    if (grown := process.memory_info().rss - before) > BYTES:
        raise Fault(f"{target.name}: {grown >> 20} MiB more are in use")
    added = {name for name in _files(folder) - files if not Path(name).name.startswith(("input", "poses_bounds"))}
    if added:
        raise Fault(f"{target.name}: wrote {sorted(added)}")
    return taken


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise _Late

    clocks = {signal.SIGPROF: (signal.ITIMER_PROF, SECONDS), signal.SIGALRM: (signal.ITIMER_REAL, WAITING)}
    former = {number: signal.signal(number, late) for number in clocks}
    for clock, seconds in clocks.values():
        signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        for clock, _ in clocks.values():
            signal.setitimer(clock, 0)
        for number, handler in former.items():
            signal.signal(number, handler)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# --- damage --------------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, -(2**63), 10**30, 0.5, -0.0, 1e308, math.nan, math.inf, -math.inf),
    *("", "x", "../../etc", "\x00", "a" * 300, "\ud800", "1e999", "nan", [], {}, [[]], [None], {"": None}, {"x": {}}),
)
"""Values that a program seldom thinks of."""


def damage(data: bytes, random: Random) -> bytes:
    """A few changes: by values where it is JSON, else by lines or bytes."""
    for _ in range(random.randint(1, 3)):
        data = random.choice((_values, _values, _lines, _bytes))(data, random)
    return data


def _values(data: bytes, random: Random) -> bytes:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(data, random)
    places = list(_places(tree, ()))
    place = random.choice(places)
    action = random.choice(("set", "set", "drop", "add", "nest", "scale"))
    if action == "nest":
        value = _at(tree, place)
        for _ in range(random.choice((1, 3, 500))):
            value = random.choice(([value], {"x": value}))
        tree = _put(tree, place, value)
    elif action == "drop" and place:
        holder = _at(tree, place[:-1])
        del holder[place[-1]]
    elif action == "add":
        holder = _at(tree, place)
        if isinstance(holder, dict):
            holder[random.choice(("x", "", "method", "r", "rank", "_", "config"))] = random.choice(ODD)
        elif isinstance(holder, list):
            holder.append(random.choice(ODD))
    elif action == "scale" and isinstance(_at(tree, place), int | float):
        tree = _put(tree, place, _at(tree, place) * random.choice((-1, 0, 10, 1000, 10**12)))
    else:
        tree = _put(tree, place, random.choice(ODD))
    try:
        return json.dumps(tree).encode()
    except (ValueError, RecursionError):
        return data


def _places(tree: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield at
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        if len(at) < 8:
            yield from _places(value, (*at, key))


def _at(tree: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def _put(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    _at(tree, place[:-1])[place[-1]] = value
    return tree


def _lines(data: bytes, random: Random) -> bytes:
    lines = data.split(b"\n")
    place = random.randrange(len(lines))
    action = random.choice(("drop", "double", "swap", "fields", "number"))
    if action == "drop":
        del lines[place]
    elif action == "double":
        lines.insert(place, lines[place])
    elif action == "swap":
        other = random.randrange(len(lines))
        lines[place], lines[other] = lines[other], lines[place]
    else:
        separator = b"\t" if b"\t" in lines[place] else b" "
        fields = lines[place].split(separator)
        odd = [b"", b"-1", b"nan", b"1e400", b"999999999999", b"x", b"\xff"]
        if action == "number":
            fields[random.randrange(len(fields))] = random.choice(odd)
        else:
            fields.insert(random.randrange(len(fields) + 1), random.choice(odd))
        lines[place] = separator.join(fields)
    return b"\n".join(lines)


def _bytes(data: bytes, random: Random) -> bytes:
    action = random.choice(("flip", "flip", "cut", "insert", "double", "number"))
    # Headers are at the beginning, and a change there goes far.
    place = random.randrange(min(len(data), random.choice((64, 512, 1 << 30))) or 1)
    if action == "flip" and data:
        return data[:place] + bytes([data[place] ^ (1 << random.randrange(8))]) + data[place + 1 :]
    if action == "cut":
        return data[:place]
    if action == "double":
        return data[:place] + data
    if action == "number":
        value = random.choice((0, 1, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
        wide = value.to_bytes(8, "little")[: random.choice((1, 2, 4, 8))]
        return data[:place] + wide + data[place + len(wide) :]
    return data[:place] + bytes(random.randrange(256) for _ in range(random.randint(1, 8))) + data[place:]


# --- targets -------------------------------------------------------------------------------------------------


def _input(folder: Path, data: bytes, suffix: str) -> Path:
    for former in folder.glob("input*"):
        former.unlink()
    path = folder / f"input{suffix}"
    path.write_bytes(data)
    return path


def _file_target(name: str, examples: Any, suffix: str, read: Callable[[Path], Any]) -> Target:
    return Target(name, examples, lambda folder, data: read(_input(folder, data, suffix)))


def _configs(folder: Path) -> list[bytes]:
    ready = {"rational": nlr.RationalConfig(activation="gelu")}
    configs = {name: ready.get(name) or method.config_class() for name, method in all_methods().items()}
    return [json.dumps({"method": name, "config": asdict(each)}).encode() for name, each in configs.items()]


def _read_config(folder: Path, data: bytes) -> Any:
    content = _json(data)
    name, values = content.get("method"), content.get("config")
    if not isinstance(name, str) or name not in all_methods() or not isinstance(values, dict):
        raise UserError("not a case of this target")
    return config_from_dict(all_methods()[name].config_class, values)


def _json(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError("not a case of this target") from error
    if not isinstance(content, dict):
        raise UserError("not a case of this target")
    return content


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _arms(folder: Path) -> list[bytes]:
    arms = ("noble:rank=16,activation=gelu", "baseline:init=noble,lr=0.001", "wide-mlp:match=noble-r64")
    arms += ("nonlinear-query+noble:rank=8", "noble:budget=5%flops,grid=1e-4/1e-3", "sine-lora:r=4,omega=200,plus=16")
    return [arm.encode() for arm in (*arms, "rational:groups=8,degrees=5/4", "lora:target_modules=query/value")]


def _read_arm(folder: Path, data: bytes) -> Any:
    text = _text(data)
    arm = Arm.parse(text)
    if str(Arm.parse(str(arm))) != str(arm):
        raise Fault(f"the arm {text!r} is printed as {str(arm)!r}, which is another")
    return arm


def _overrides(folder: Path) -> list[bytes]:
    options = (
        ["--steps", "100", "--lr", "1e-3", "--batch-size", "4"],
        ["--task.backbone.width", "64", "--out", "x", "--train.schedule", "linear"],
        ["--arm", "noble:rank=4", "--eval-every", "5", "--train.no-bf16", "--source", "stdlib"],
    )
    return ["\n".join(each).encode() for each in options]


def _read_overrides(folder: Path, data: bytes) -> Any:
    words = _text(data).split("\n")
    if {"-h", "--help"} & set(words):
        raise UserError("not a case of this target")
    return parse_recipe(
        TrainOptions, ["llm-demo", *words], command="train", defaults=lambda each: {"out": "x", "arm": str(each.arm)}
    )


def _model(folder: Path) -> Path:
    """A model with branches, its tokenizer, and an adapter for the plain one."""
    whole = folder / "whole"
    if not whole.exists():
        language_model(whole / "plain")
        model = load_model(whole / "plain")
        nlr.augment(model, nlr.NobleConfig(rank=2), verbose=False)
        model.save_pretrained(whole / "branches")
        for file in (whole / "plain").glob("*token*"):
            shutil.copy(file, whole / "branches")
        adapted = get_peft_model(load_model(whole / "plain"), nlr.SineLoraConfig(r=2, target_modules=["q_proj"]))
        adapted.save_pretrained(whole / "adapter")
        shutil.copytree(whole, folder / "copy")
    return whole


def _part(target: str, file: str, read: Callable[[Path], Any]) -> Target:
    """Return the target of one file of a model or an adapter, whose folder is read."""

    def replaced(folder: Path, data: bytes) -> Any:
        place = folder / "copy" / file
        place.write_bytes(data)
        return read(place.parent)

    return Target(target, lambda folder: [(_model(folder) / file).read_bytes()], replaced)


def _load_model(place: Path) -> Any:
    load_tokenizer(place)
    return load_model(place)


def _load_adapter(place: Path) -> Any:
    return load_causal_adapter(place, base=str(place.parent / "plain"))


_TETRAHEDRON = (
    np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1.0]]),
    np.array([[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]]),
)


def _meshes(suffix: str) -> Callable[[Path], list[bytes]]:
    def examples(folder: Path) -> list[bytes]:
        mesh = trimesh.Trimesh(*_TETRAHEDRON, process=False)
        if suffix == ".npz":
            return [_npz(vertices=_TETRAHEDRON[0], faces=_TETRAHEDRON[1])]
        found = [mesh.export(file_type=suffix[1:])]
        if suffix == ".stl":
            found.append(mesh.export(file_type="stl_ascii"))
        if suffix == ".ply":
            found.append(mesh.export(file_type="ply", encoding="ascii"))
        return [each.encode() if isinstance(each, str) else each for each in found]

    return examples


def _npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def _poses(folder: Path) -> list[bytes]:
    (folder / "scene" / "images").mkdir(parents=True, exist_ok=True)
    for index in range(3):
        Image.new("RGB", (8, 6)).save(folder / "scene" / "images" / f"{index}.png")
    rows = []
    for index in range(3):
        pose = np.concatenate([np.eye(3), [[index], [0.0], [0.0]], [[6], [8], [7.0]]], axis=1)
        rows.append([*pose.ravel(), 1.0, 5.0])
    stream = io.BytesIO()
    np.save(stream, np.array(rows))
    return [stream.getvalue()]


def _read_poses(folder: Path, data: bytes) -> Any:
    (folder / "scene" / "poses_bounds.npy").write_bytes(data)
    return read_scene(folder / "scene", held_out=[0])


def _transforms(folder: Path) -> list[bytes]:
    (folder / "blender").mkdir(exist_ok=True)
    Image.new("RGBA", (8, 8)).save(folder / "blender" / "r_0.png")
    frames = [{"file_path": "./r_0", "transform_matrix": np.eye(4).tolist()} for _ in range(2)]
    content = json.dumps({"camera_angle_x": 0.7, "frames": frames})
    for side in ("train", "test"):
        (folder / "blender" / f"transforms_{side}.json").write_text(content)
    return [content.encode()]


def _read_transforms(folder: Path, data: bytes) -> Any:
    (folder / "blender" / "transforms_train.json").write_bytes(data)
    return read_scene(folder / "blender")


OFFICIAL_COLA = b"gj04\t1\t\tOur friends won't buy this.\ngj04\t0\t*\tThey drank the pub.\n"


def _tsv(name: str, folder_name: str, task: str, *more: bytes) -> Target:
    def examples(folder: Path) -> list[bytes]:
        glue_folder(folder / "glue", rows=6)
        return [(folder / "glue" / folder_name / "train.tsv").read_bytes(), *more]

    return _file_target(name, examples, ".tsv", lambda path: read_tsv(path, task))


def _instructions(folder: Path) -> list[bytes]:
    alpaca = [{"instruction": "Add.", "input": "1 and 2", "output": "3"}, {"instruction": "Say hi.", "output": "hi"}]
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    lines = "\n".join(json.dumps(each) for each in (*alpaca, chat))
    return [json.dumps(alpaca, indent=1).encode(), json.dumps([chat]).encode(), lines.encode()]


def _corpus(suffix: str, pack: Callable[[bytes], bytes]) -> Target:
    lines = b'{"text": "one"}\n{"text": "two, and more"}\n'

    def read(path: Path) -> Any:
        return list(Corpus(source=str(path), max_bytes=1 << 20).documents())

    return _file_target(f"text {suffix}", lambda folder: [pack(lines)], suffix, read)


def _pictures(folder: Path) -> list[bytes]:
    found = []
    for kind in ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP"):
        stream = io.BytesIO()
        Image.new("RGB", (9, 7), (200, 10, 30)).save(stream, kind)
        found.append(stream.getvalue())
    return found


def _image_sets(folder: Path) -> list[bytes]:
    images = np.arange(4 * 8 * 8 * 3, dtype=np.uint8).reshape(4, 8, 8, 3)
    packed = _npz(images=images, labels=np.array([0, 1, 0, 1]))
    return [packed, lzma.compress(packed)]


def _read_image_set(folder: Path, data: bytes) -> Any:
    return read_images(str(_input(folder, data, ".npz.xz" if data[:1] == b"\xfd" else ".npz")))


TARGETS = [
    Target("config", _configs, _read_config),
    Target(
        "recipe",
        lambda _: [get_recipe(name).to_json().encode() for name in ("llm-demo", "glue-minilm", "vit-demo")],
        lambda _, data: Recipe.from_json(_text(data)),
    ),
    Target("arm", _arms, _read_arm),
    Target("overrides", _overrides, _read_overrides),
    _part("model config", "branches/config.json", _load_model),
    _part("model weights", "branches/model.safetensors", _load_model),
    _part("model verified", "branches/model.safetensors", verify),
    _part("model tokenizer", "branches/tokenizer.json", _load_model),
    _part("adapter config", "adapter/adapter_config.json", _load_adapter),
    _part("adapter weights", "adapter/adapter_model.safetensors", _load_adapter),
    *(
        _file_target(f"mesh {suffix}", _meshes(suffix), suffix, read_mesh)
        for suffix in (".obj", ".ply", ".stl", ".npz")
    ),
    Target("poses", _poses, _read_poses),
    Target("transforms", _transforms, _read_transforms),
    _tsv("TSV, one sentence", "CoLA", "cola", OFFICIAL_COLA),
    _tsv("TSV, pairs", "STS-B", "stsb"),
    _file_target("instructions", _instructions, ".json", lambda path: list(read_examples(str(path), "alpaca"))),
    _corpus(".jsonl", bytes),
    _corpus(".jsonl.gz", gzip.compress),
    _corpus(".txt", bytes),
    _file_target("picture", _pictures, ".png", lambda path: read_image(str(path))),
    Target("image set", _image_sets, _read_image_set),
]
