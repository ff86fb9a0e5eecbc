from .language_model import OptBackbone, OptLanguageModelTask  # noqa: D100, F401
