"""Small pictures and folders of them."""

import io

import numpy as np
from PIL import Image

from seeds import rng


def noise(*shape):
    return rng().integers(0, 256, shape, dtype=np.uint8)


def png(array):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


def damaged_folder(path, train, test, broken=()):
    """<path>/<side>/<class>/<number>.png of the classes ant and bee; `broken` are such names that hold no image."""
    for side, count in (("train", train), ("test", test)):
        for name in ("ant", "bee"):
            (path / side / name).mkdir(parents=True)
            for index in range(count):
                file = f"{side}/{name}/{index}.png"
                (path / file).write_bytes(b"no image" if file in broken else png(noise(8, 8)))
    return path
