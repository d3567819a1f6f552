"""dragoman: neural machine translation by the Transformer of "Attention Is All You Need".

    import dragoman
    translator = dragoman.load("runs/en-zh")
    print(translator.translate("Hello world.").text)

This page is the façade and nothing else. PyTorch is loaded when a model is, so importing the package is quick.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dragoman.translator import Translator, load

__version__ = "0.1.0"
__all__ = ["Translator", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """Fetch `load` and `Translator` from their room on first use (PEP 562)."""
    if name in ("Translator", "load"):
        from dragoman import translator

        return getattr(translator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
