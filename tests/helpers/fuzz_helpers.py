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
from nlr_lab.runtime.storage import read_json
from nlr_lab.tasks.finetune.classification import read_tsv
from nlr_lab.tasks.finetune.records import read_examples
from nlr_lab.tasks.images.sources import read_images
from nlr_lab.tasks.text.data import Corpus
from nlr_lab.training import Arm, Recipe
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub import load_model, load_tokenizer
from nonlinear_lowrank.hub.loading import load_causal_adapter
from nonlinear_lowrank.hub.verify import verify
from nonlinear_lowrank.methods.base import all_methods, config_from_dict

SECONDS, BYTES = 20, 512 << 20
"""Limits of one case: seconds of the processor, and bytes it keeps."""


@dataclass(frozen=True)
class Target:
    """One reader of a file."""

    name: str
    file: str
    """Path of the file in a folder."""
    examples: Callable[[Path], list[bytes]]
    """Valid contents; may put files that stay as they are into the folder."""
    read: Callable[[Path], Any]
    """Function that reads the file; raises UserError."""


class Fault(AssertionError):
    """A reader did what it must not do."""


class _Late(BaseException):
    """Past the time limit. No Exception: a reader that catches those would make a refusal of it."""


def try_one(target: Target, folder: Path, data: bytes) -> bool:
    """Read one input and return whether it was taken; raise Fault."""
    process, path = psutil.Process(), folder / target.file
    before, files = process.memory_info().rss, None
    try:
        with _time_limit(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            path.write_bytes(data)
            files = _files(folder)
            target.read(path)
        taken = True
    except UserError as error:
        if not str(error).strip():
            raise Fault(f"{target.name}: refused without a word") from error
        taken = False
    except _Late as error:
        raise Fault(f"{target.name}: took more than {SECONDS} s of the processor") from error
    except (Exception, RecursionError, SystemExit) as error:
        raise Fault(f"{target.name}: {type(error).__name__}: {error}") from error
    if (grown := process.memory_info().rss - before) > BYTES:
        raise Fault(f"{target.name}: {grown >> 20} MiB more are in use")
    if added := _files(folder) - files:
        raise Fault(f"{target.name}: wrote {sorted(added)}")
    return taken


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise _Late

    former = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, former)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


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
        root = [json.loads(data)]
    except (ValueError, RecursionError):
        return _bytes(data, random)
    holder, key = random.choice(list(_places(root)))
    value, action = holder[key], random.choice(("set", "set", "drop", "add", "nest", "scale"))
    if action == "drop" and holder is not root:
        del holder[key]
    elif action == "add" and isinstance(value, dict):
        value[random.choice(("x", "", "method", "r", "rank", "_", "config"))] = random.choice(ODD)
    elif action == "add" and isinstance(value, list):
        value.append(random.choice(ODD))
    elif action == "nest":
        for _ in range(random.choice((1, 3, 500))):
            holder[key] = random.choice(([holder[key]], {"x": holder[key]}))
    elif action == "scale" and isinstance(value, int | float):
        holder[key] = value * random.choice((-1, 0, 10, 1000, 10**12))
    else:
        holder[key] = random.choice(ODD)
    try:
        return json.dumps(root[0]).encode()
    except (ValueError, RecursionError):
        return data


def _places(holder: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every (list or dict, place in it)."""
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], dict | list) and depth < 8:
            yield from _places(holder[key], depth + 1)


def _lines(data: bytes, random: Random) -> bytes:
    lines = data.split(b"\n")
    place = random.randrange(len(lines))
    action = random.choice(("drop", "double", "insert", "replace"))
    if action == "drop":
        del lines[place]
    elif action == "double":
        lines.insert(place, lines[place])
    else:
        separator = b"\t" if b"\t" in lines[place] else b" "
        fields = lines[place].split(separator)
        at = random.randrange(len(fields))
        odd = random.choice([b"", b"-1", b"nan", b"1e400", b"999999999999", b"x", b"\xff"])
        fields[at : at + (action == "replace")] = [odd]
        lines[place] = separator.join(fields)
    return b"\n".join(lines)


def _bytes(data: bytes, random: Random) -> bytes:
    action = random.choice(("flip", "flip", "cut", "insert", "double", "number"))
    # Headers are at the beginning, and a change there goes far.
    place = random.randrange(min(len(data), random.choice((64, 512, 1 << 30))) or 1)
    before, after = data[:place], data[place:]
    if action == "flip" and after:
        return before + bytes([after[0] ^ (1 << random.randrange(8))]) + after[1:]
    if action == "cut":
        return before
    if action == "double":
        return before + data
    if action == "number":
        value = random.choice((0, 1, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
        wide = value.to_bytes(8, "little")[: random.choice((1, 2, 4, 8))]
        return before + wide + after[len(wide) :]
    return before + random.randbytes(random.randint(1, 8)) + after


def _configs(folder: Path) -> list[bytes]:
    ready = {"rational": nlr.RationalConfig(activation="gelu")}
    configs = {name: ready.get(name) or method.config_class() for name, method in all_methods().items()}
    return [json.dumps({"method": name, "config": asdict(each)}).encode() for name, each in configs.items()]


def _read_config(path: Path) -> Any:
    try:
        content = json.loads(path.read_bytes())
        method = all_methods()[content["method"]]
        values = dict(content["config"])
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise UserError("not a case of this target") from error
    return config_from_dict(method.config_class, values)


def _recipes(folder: Path) -> list[bytes]:
    return [json.dumps(get_recipe(name).to_dict()).encode() for name in ("llm-demo", "glue-minilm", "vit-demo")]


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace")


def _arms(folder: Path) -> list[bytes]:
    arms = ("noble:rank=16,activation=gelu", "baseline:init=noble,lr=0.001", "wide-mlp:match=noble-r64")
    arms += ("nonlinear-query+noble:rank=8", "noble:budget=5%flops,grid=1e-4/1e-3", "sine-lora:r=4,omega=200,plus=16")
    return [arm.encode() for arm in (*arms, "rational:groups=8,degrees=5/4", "lora:target_modules=query/value")]


def _read_arm(path: Path) -> Any:
    arm = Arm.parse(_text(path))
    if str(Arm.parse(str(arm))) != str(arm):
        raise Fault(f"the arm {_text(path)!r} is printed as {str(arm)!r}, which is another")


def _overrides(folder: Path) -> list[bytes]:
    return [
        b"--steps\n100\n--lr\n1e-3\n--batch-size\n4",
        b"--task.backbone.width\n64\n--out\nx\n--train.schedule\nlinear",
        b"--arm\nnoble:rank=4\n--eval-every\n5\n--train.no-bf16\n--source\nstdlib",
    ]


def _read_overrides(path: Path) -> Any:
    words = _text(path).split("\n")
    if {"-h", "--help"} & set(words):
        raise UserError("not a case of this target")
    return parse_recipe(
        TrainOptions, ["llm-demo", *words], command="train", defaults=lambda each: {"out": "x", "arm": str(each.arm)}
    )


def _part(name: str, file: str, read: Callable[[Path], Any]) -> Target:
    """Return the target of one file of a model with branches, or of an adapter of the plain one."""

    def examples(folder: Path) -> list[bytes]:
        if not (folder / "plain").exists():
            language_model(folder / "plain")
            model = load_model(folder / "plain")
            adapted = get_peft_model(load_model(folder / "plain"), nlr.SineLoraConfig(r=2, target_modules=["q_proj"]))
            adapted.save_pretrained(folder / "adapter")
            nlr.augment(model, nlr.NobleConfig(rank=2), verbose=False)
            model.save_pretrained(folder / "branches")
            for each in (folder / "plain").glob("*token*"):
                shutil.copy(each, folder / "branches")
        return [(folder / file).read_bytes()]

    return Target(name, file, examples, lambda path: read(path.parent))


def _load_model(place: Path) -> Any:
    load_tokenizer(place)
    return load_model(place)


def _load_adapter(place: Path) -> Any:
    return load_causal_adapter(place, base=str(place.parent / "plain"))


_TETRAHEDRON = (
    np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1.0]]),
    np.array([[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]]),
)


def _mesh(suffix: str, *forms: dict[str, str]) -> Target:
    """Return the target of one kind of mesh file, in the forms that trimesh writes."""

    def examples(folder: Path) -> list[bytes]:
        if not forms:
            return [_npz(vertices=_TETRAHEDRON[0], faces=_TETRAHEDRON[1])]
        mesh = trimesh.Trimesh(*_TETRAHEDRON, process=False)
        found = [mesh.export(**form) for form in forms]
        return [each.encode() if isinstance(each, str) else each for each in found]

    return Target(f"mesh {suffix}", f"input{suffix}", examples, read_mesh)


def _npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def _poses(folder: Path) -> list[bytes]:
    (folder / "scene" / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(3):
        Image.new("RGB", (8, 6)).save(folder / "scene" / "images" / f"{index}.png")
        pose = np.concatenate([np.eye(3), [[index], [0.0], [0.0]], [[6], [8], [7.0]]], axis=1)
        rows.append([*pose.ravel(), 1.0, 5.0])
    stream = io.BytesIO()
    np.save(stream, np.array(rows))
    return [stream.getvalue()]


def _transforms(folder: Path) -> list[bytes]:
    (folder / "blender").mkdir(exist_ok=True)
    for name in ("r_0", "r_1"):
        Image.new("RGBA", (8, 8)).save(folder / "blender" / f"{name}.png")
    frames = [{"file_path": "./r_0", "transform_matrix": np.eye(4).tolist()} for _ in range(2)]
    content = json.dumps({"camera_angle_x": 0.7, "frames": frames})
    (folder / "blender" / "transforms_test.json").write_text(content.replace("r_0", "r_1"))
    return [content.encode()]


OFFICIAL_COLA = b"gj04\t1\t\tOur friends won't buy this.\ngj04\t0\t*\tThey drank the pub.\n"


def _tsv(name: str, folder_name: str, task: str, *more: bytes) -> Target:
    def examples(folder: Path) -> list[bytes]:
        glue_folder(folder / "glue", rows=6)
        return [(folder / "glue" / folder_name / "train.tsv").read_bytes(), *more]

    return Target(name, "input.tsv", examples, lambda path: read_tsv(path, task))


def _instructions(folder: Path) -> list[bytes]:
    alpaca = [{"instruction": "Add.", "input": "1 and 2", "output": "3"}, {"instruction": "Say hi.", "output": "hi"}]
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    lines = "\n".join(json.dumps(each) for each in (*alpaca, chat))
    return [json.dumps(alpaca, indent=1).encode(), json.dumps([chat]).encode(), lines.encode()]


def _corpus(suffix: str, pack: Callable[[bytes], bytes]) -> Target:
    lines = pack(b'{"text": "one"}\n{"text": "two, and more"}\n')

    def read(path: Path) -> Any:
        return list(Corpus(source=str(path), max_bytes=1 << 20).documents())

    return Target(f"text {suffix}", f"input{suffix}", lambda folder: [lines], read)


def _pictures(folder: Path) -> list[bytes]:
    found = []
    for kind in ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP"):
        stream = io.BytesIO()
        Image.new("RGB", (9, 7), (200, 10, 30)).save(stream, kind)
        found.append(stream.getvalue())
    return found


def _image_set(name: str, suffix: str, pack: Callable[[bytes], bytes]) -> Target:
    images = np.arange(4 * 8 * 8 * 3, dtype=np.uint8).reshape(4, 8, 8, 3)
    packed = pack(_npz(images=images, labels=np.array([0, 1, 0, 1])))
    return Target(name, f"input{suffix}", lambda folder: [packed], lambda path: read_images(str(path)))


TARGETS = [
    Target("config", "input.json", _configs, _read_config),
    Target("recipe", "input.json", _recipes, lambda path: Recipe.from_dict(read_json(path))),
    Target("arm", "input", _arms, _read_arm),
    Target("overrides", "input", _overrides, _read_overrides),
    _part("model config", "branches/config.json", _load_model),
    _part("model weights", "branches/model.safetensors", _load_model),
    _part("model verified", "branches/model.safetensors", verify),
    _part("model tokenizer", "branches/tokenizer.json", _load_model),
    _part("adapter config", "adapter/adapter_config.json", _load_adapter),
    _part("adapter weights", "adapter/adapter_model.safetensors", _load_adapter),
    _mesh(".obj", {"file_type": "obj"}),
    _mesh(".ply", {"file_type": "ply"}, {"file_type": "ply", "encoding": "ascii"}),
    _mesh(".stl", {"file_type": "stl"}, {"file_type": "stl_ascii"}),
    _mesh(".npz"),
    Target("poses", "scene/poses_bounds.npy", _poses, lambda path: read_scene(path.parent, held_out=[0])),
    Target("transforms", "blender/transforms_train.json", _transforms, lambda path: read_scene(path.parent)),
    _tsv("TSV, one sentence", "CoLA", "cola", OFFICIAL_COLA),
    _tsv("TSV, pairs", "STS-B", "stsb"),
    Target("instructions", "input.json", _instructions, lambda path: list(read_examples(str(path), "alpaca"))),
    _corpus(".jsonl", bytes),
    _corpus(".jsonl.gz", gzip.compress),
    _corpus(".txt", bytes),
    Target("picture", "input.png", _pictures, lambda path: read_image(str(path))),
    _image_set("image set", ".npz", bytes),
    _image_set("image set, packed", ".npz.xz", lzma.compress),
]
