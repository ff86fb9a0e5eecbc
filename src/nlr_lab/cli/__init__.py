"""The commands of `nlr`, functions `run_NAME(arguments)`; this table is all that `nlr --help` reads."""

COMMANDS = {
    "recipes": ("recipes", "list the recipes of train, finetune and fit; compare takes all of them"),
    "train": ("train RECIPE", "train one model: baseline, or with a method"),
    "finetune": ("finetune RECIPE", "tune a pretrained model: an adapter, its head, or all of it"),
    "fit": ("fit RECIPE", "fit a coordinate network: an image, a shape, a scene"),
    "compare": ("compare RECIPE", "train baselines and methods on the same batches; table, picture, report"),
    "watch": ("watch DIR", "curves, state and time left of runs, while they run: here and on a local page"),
    "scale": ("scale", "a ladder of sizes: compare at each, fit laws, predict the next size"),
    "recommend": ("recommend MODEL", "which method, rank and place for a model, and what gain to expect"),
    "reproduce": ("reproduce TABLE", "a table or figure of the papers: published numbers beside ours"),
    "evaluate": ("evaluate CHECKPOINT", "perplexity, bits per byte, lm-eval tasks, MMLU, commonsense"),
    "generate": ("generate CHECKPOINT", "continue a prompt, or draw images"),
    "inspect": ("inspect MODEL", "parameters, FLOPs and saved activations by layer, without building the model"),
    "plan": ("plan MODEL", "memory, traffic and hours of training on given GPUs, arm by arm"),
    "convert": ("convert IN OUT", "put a method into a trained checkpoint, its weights kept"),
    "merge": ("merge ADAPTER OUT", "put an adapter into its base's weights: a plain model"),
    "verify": ("verify CHECKPOINT", "check that it is whole: hashes, headers, NaN, JSON of every file"),
    "bench": ("bench WHAT", "time and memory of a step, an operator or a token; compiled GPU kernels"),
    "completion": ("completion SHELL", "print the completion script of bash, zsh or fish"),
}
"""Usage and summary by command."""
FILES = {"finetune": "train", "fit": "train", "merge": "convert", "verify": "convert"}
"""The file of a command that has none of its own name."""
