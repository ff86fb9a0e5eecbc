from .encoding import as_square, prepare_images  # noqa: F401
from .tokens import ImageTokenData  # noqa: F401
