"""Rows like those of MMLU and of LLM-Adapters' commonsense tests, and a tiny model to ask them.

Everything is drawn from torch's generator, which each test seeds anew.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tokenizer_helpers import word_tokenizer

WORDS = (
    *("stone", "river", "tree", "cloud", "iron", "bread", "lamp", "wolf", "seven", "yellow"),
    *("runs", "falls", "holds", "quiet", "under", "north"),
)
ANSWERS = ["true", "false", *(f"{w}{i}" for w in ("solution", "answer", "ending", "option") for i in range(1, 6))]
END = "<end>"


def words(low: int = 3, high: int = 9) -> str:
    count = int(torch.randint(low, high, ()))
    return " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (count,)))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: any text can be asked."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*alphabet, END])}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, bos_token=END)


def answer_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, the answers among them: a random model writes an answer now and then."""
    return word_tokenizer(["<unk>", END, *ANSWERS, *WORDS], eos_token=END, bos_token=END, unk_token="<unk>")


def tiny_model(tokenizer, positions: int = 4096, dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """Weights large enough that its choices differ from question to question."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    more = {"vocab_size": len(tokenizer), "max_position_embeddings": positions, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(**sizes, **ends, **more)).to(dtype).eval()


@torch.no_grad()
def likelihoods(model, tokenizer, context: str, continuations: list[str]) -> torch.Tensor:
    """log p(continuation | context) of each, by one forward pass of its own over the whole text."""
    start = len(tokenizer(context)["input_ids"])
    sums = []
    for continuation in continuations:
        ids = tokenizer(context + continuation)["input_ids"]
        log_probs = model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        sums.append(sum(log_probs[i - 1, ids[i]] for i in range(start, len(ids))))
    return torch.stack(sums)


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def mmlu_rows(subjects: list[str], count: int) -> list[dict]:
    def row(subject):
        question, choices = f" {words()}? ", [words(1, 4) for _ in range(4)]
        return {"subject": subject, "question": question, "choices": choices, "answer": int(torch.randint(4, ()))}

    return [row(subject) for _ in range(count) for subject in subjects]


def commonsense_rows(test: str, count: int) -> list[dict]:
    """Rows of the layout that LLM-Adapters gave a test; `parts` has question and choices beside."""
    return [_row(test) for _ in range(count)]


def _row(test: str) -> dict:
    question = words()
    if test == "boolq":
        right = ["false", "true"][int(torch.randint(2, ()))]
        text = f"Please answer the following question with true or false, question: {question}?"
        return _with_parts(f"{text}\n\nAnswer format: true/false", right, question + "?", ["no", "yes"])
    ask, blank = "Please choose the correct", "to fill in the blank to complete the given sentence: "
    word, count, opening, gap, before = {
        "piqa": ("Solution", 2, f"{ask} solution to the question: ", "\n\n", "\n\n"),
        "social_i_qa": ("Answer", 3, f"{ask} answer to the question: ", " ", "\n\n"),
        "hellaswag": ("Ending", 4, f"{ask} ending to complete the given sentence: ", " ", "\n\n"),
        "winogrande": ("Option", 2, f"{ask} answer {blank}", " ", " "),
    }.get(test, ("Answer", int(torch.randint(3, 6, ())), f"{ask} answer to the question: ", " ", "\n\n"))
    if test == "winogrande":
        question = f"{question} _ {words()}."
    choices = [words(1, 6) for _ in range(count)]
    listed = gap.join(f"{word}{i}: {choice}" for i, choice in enumerate(choices, start=1))
    names = [f"{word.lower()}{i}" for i in range(1, count + 1)]
    text = f"{opening}{question}\n\n{listed}{before}Answer format: {'/'.join(names)}"
    return _with_parts(text, names[int(torch.randint(count, ()))], question, choices)


def _with_parts(instruction: str, answer: str, question: str, choices: list[str]) -> dict:
    row = {"instruction": instruction, "input": "", "output": f"the correct answer is {answer}", "answer": answer}
    return {**row, "parts": {"question": question, "choices": choices}}
