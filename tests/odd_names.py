"""File names that a store and a folder must take as they are, however odd they look."""

ODD_NAMES = (
    "a b.png",
    "bild-\u00e4\u6f22.png",
    "50%20off.png",
    "-rf",
    "...",
    ".hidden",
    "~x.png",
    "$HOME.png",
    "a*b?.png",
    "a;b",
)
