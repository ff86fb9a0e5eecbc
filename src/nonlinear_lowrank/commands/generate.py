"""`nlr generate CHECKPOINT --prompt TEXT`."""

from dataclasses import dataclass

from tyro.conf import Positional

from .checkpoint import find_model, open_language_model, open_tokenizer
from .options import parse


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Continue a prompt with a trained language model."""

    checkpoint: Positional[str]
    """A model folder, an adapter of peft, or the run folder that `nlr train` wrote."""
    base: str | None = None
    """Folder or name of an adapter's base model, where it is not what the adapter names."""
    prompt: str = ""
    """The text to continue; empty starts a new document."""
    max_new_tokens: int | None = None
    """Stop after this many tokens, or at the end-of-text token; default: 128, or as many as fit."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the most likely token every time."""
    top_k: int = 50
    """Draw from the k most likely tokens; 0: from all."""
    seed: int = 0
    """The same seed, model and prompt give the same text on the same machine."""
    device: str = ""
    """cpu, cuda or cuda:N; default: the GPU when there is one."""


def run(arguments: list[str]) -> None:
    """Prints the prompt and its continuation as it is generated."""
    options = parse(
        GenerateOptions, arguments, command="generate", description="Continue a prompt with a trained language model."
    )
    folder = find_model(options.checkpoint, adapters=True)

    from ..generation import Sampling, encode_prompt, generate_text

    sampling = Sampling(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    model = open_language_model(folder, options.device, options.base)
    tokenizer = open_tokenizer(folder, options.base)
    encode_prompt(model, tokenizer, options.prompt, sampling.max_new_tokens)  # refuses before anything is printed
    print(options.prompt, end="", flush=True)
    generate_text(model, tokenizer, options.prompt, sampling, lambda text: print(text, end="", flush=True))
    print()
