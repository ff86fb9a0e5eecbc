"""`nlr completion bash|zsh|fish`: the script by which a shell completes commands, recipes and options."""

import importlib
from dataclasses import dataclass
from typing import Literal

from tyro.conf import Positional

from nlr_lab.recipes import KINDS, recipes_of

from . import COMMANDS, FILES
from .options import LIST_OPTIONS, parse

_BASH = """\
_nlr() {
    local words
    words=$(nlr completion words "${COMP_WORDS[@]:1:COMP_CWORD-1}" 2>/dev/null)
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _nlr nlr"""
_ZSH = """\
(( $+functions[compdef] )) || { autoload -U compinit && compinit }
_nlr() {
    local -a found
    found=(${(f)"$(nlr completion words "${(@)words[2,CURRENT-1]}" 2>/dev/null)"})
    compadd -a found || _files
}
compdef _nlr nlr"""
_SCRIPTS = {
    "bash": _BASH,
    "zsh": _ZSH,
    "fish": 'complete -c nlr -a "(nlr completion words (commandline -opc)[2..] 2>/dev/null)"',
}


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Print a script that completes commands, recipes and options. For bash: eval "$(nlr completion bash)" in
    ~/.bashrc; for zsh the same in ~/.zshrc; for fish: nlr completion fish > ~/.config/fish/completions/nlr.fish."""

    shell: Positional[Literal["bash", "zsh", "fish"]]
    """The shell."""


def run_completion(arguments: list[str]) -> None:
    """Print the script; or, for the script, the words that may come next."""
    if arguments[:1] != ["words"]:
        print(_SCRIPTS[parse(CompletionOptions, arguments, command="completion").shell])
        return
    command, *rest = arguments[1:] or [""]
    if not command:
        print("\n".join(COMMANDS))
    elif command in (*KINDS, "compare", "plan", "inspect") and not rest:
        print("\n".join(recipes_of(command)))
    elif command == "bench" and not rest:
        from .bench import BENCHES

        print("\n".join(BENCHES))
    elif command in COMMANDS:
        named = rest[:1] if command in (*KINDS, "compare", "bench") else []
        module = importlib.import_module(f".{FILES.get(command, command)}", __package__)
        getattr(module, f"run_{command}")([*named, LIST_OPTIONS])
