"""Commands whose words make no sense: one line that names the fix, and nothing is written."""

import pytest

from cli_helpers import refused

FILES = {
    "zero.png": b"",
    "zero.pgm": b"P5 0 4 255\n",
    "broken.json": b"{",
    "other.json": b'{"a": 1}',
    "strange.json": b'{"model_type": "no_such_type"}',
    "wrong.json": b'{"model_type": "llama", "hidden_size": "wide"}',
}
ROWS = [  # a command, and words of the line
    ("trian llm-demo", "trian", "'train'"),
    ("zzzz", "zzzz", "compare"),
    ("llm-demo --steps 3", "llm-demo is a recipe: nlr train llm-demo"),
    ("recipes --json", "--json"),
    ("train", "name a recipe", "llm-demo"),
    ("train llm-dmo", "llm-dmo", "'llm-demo'"),
    ("compare qqq", "qqq", "llm-small"),
    ("train --out x", "name a recipe"),
    # Each recipe's own model has its own fields.
    ("train sine-convnext-demo --patch 3", "8 pixels do not split into patches of 3, halved 3 times; choose 24"),
    ("train llm-demo --warmup 10", "did you mean --warmup-share or --warmup-steps"),
    ("train llm-demo --arm noble:rank=4,grid=1e-3/1e-2", "grid is for nlr compare"),
    ("train llm-demo --arm noble:rank=4,head_lr=1e-3", "the model has no new head"),
    ("train llm-demo --out zero.png", "zero.png is a file; name a folder"),
    ("fit image-demo --out . --arm dense", ". is not empty; choose another folder"),
    ("compare llm-demo --seeds 0", "--seeds must be a positive integer, got 0"),
    ("compare llm-demo --tune-lr 1e-3 fast", "--tune-lr: cannot be '1e-3', 'fast'"),
    ("completion powershell", "SHELL: invalid choice 'powershell'; choose one of 'bash', 'zsh', 'fish'"),
    ("verify nowhere", "no such file or folder: nowhere"),
    ("generate", "CHECKPOINT"),
    ("generate /no/such/folder", "/no/such/folder"),
    ("evaluate /no/such/folder --batch-size 1e1", "/no/such/folder"),
    ("evaluate /no/such/folder --batch-size 1e-1", "--batch-size: must be an integer, got '1e-1'"),
    ("convert /no/such/folder out", "/no/such/folder"),
    ("generate . --promt x", "--promt", "--prompt"),
    ("fit", "name a recipe first"),
    ("fit image-demos", "did you mean 'image-demo'"),
    ("fit llm-demo", "llm-demo trains a model from scratch: nlr train llm-demo"),
    ("train image-demo", "image-demo fits a field: nlr fit image-demo"),
    ("fit image-demo --source zero.png", "zero.png"),
    ("fit image-demo --source zero.pgm", "zero.pgm"),
    ("compare image-demo --max-minutes 0", "--max-minutes must be above 0"),
    ("compare image-demo --max-minutes nan", "--max-minutes must be above 0 and finite"),
    ("compare image-demo --timing-rounds -1", "--timing-rounds must be an integer of at least 0"),
    ("compare image-demo --arms dense sine:rank=400,omega=3", "rank 400 saves no parameters"),
    ("compare image-demo --reference sine", "there is no arm 'sine' to be the reference; there are dense, "),
    ("compare image-demo --workers 0", "workers must be a positive integer, got 0"),
    ("plan llm-nothing", "unknown recipe"),
    ("plan 9b", "unknown size '9b'; there are 124m"),
    ("plan image-demo", "fits a field"),
    ("plan llm-demo --hardware abacus", "unknown hardware 'abacus'; there are a100, "),
    ("plan llm-demo --gpus 3", "--batch-size"),
    ("plan glue-minilm", "--steps"),
    ("inspect llm-dem", "'llm-demo'"),
    ("inspect image-demo", "image-demo fits a field"),
    ("inspect nowhere/config.json", "nowhere/config.json"),
    ("inspect llm-demo --rank 128", "rank", "128"),
    ("inspect llm-demo --rank 8 --arm baseline", "--rank", "--arm"),
    ("inspect llm-demo --sequence-length 0", "sequence_length"),
    ("inspect broken.json", "broken.json"),
    ("inspect other.json", "other.json", "model_type"),
    ("inspect strange.json", "strange.json", "no_such_type"),
    ("inspect wrong.json", "wrong.json"),
    ("bench stop", "unknown benchmark 'stop'"),
    ("bench", "nlr bench step"),
    ("bench op noble", "unrecognized argument noble; write nlr bench op --operators noble"),
    ("bench step --modes fast", "--modes: invalid choice 'fast'"),
    ("bench kernels --operators tanh", "choose one of 'cosnet', 'rational', 'sine'"),
    ("bench kernels --capability 75", "--capability: invalid choice '75'"),
    ("bench step --device tpu9", "tpu9"),
    ("bench all --tiny --clock cuda", "the clock 'cuda' is for --device cuda; use 'process' or 'wall' on cpu"),
    ("bench step --out /no/such/folder/b.json", "/no/such/folder"),
    ("bench memory --picture /no/such/folder/b.png", "/no/such/folder"),
    ("bench kernels --picture k.png", "draws no picture"),
    ("bench traffic --hardware h1", "unknown hardware 'h1'"),
    ("bench decode --out .", "is a folder; name a file (--out)"),
    ("bench decode --methods nonlinear-query --fuse-shared-inputs", "--fuse-shared-inputs is NOBLE's"),
    (
        "bench step --methods noble noble-official --depth 1",
        "noble-official is NOBLE as in the paper; omit it or depth",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_wrong_words_are_one_line(capsys, monkeypatch, tmp_path, row):
    command, *words = row
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    err = refused(capsys, *command.split())
    assert all(word in err for word in words), err
    assert {path.name for path in tmp_path.iterdir()} == FILES.keys()
