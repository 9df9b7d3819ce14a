"""A GGUF model with its 4-bit blocks in another layout: python bench/peers/requantise.py Q4_0 [--model ...] FILE

llama.cpp has fast products over several rows for some layouts only, and a model in another one would be no measure of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGMLQuantizationType, GGUFValueType, LlamaFileType
from gguf.quants import dequantize, quantize

from specdec.config import DEFAULT_MODEL
from specdec.models.source import resolve

LAYOUTS = ("Q4_0", "Q8_0")


def requantise(source: Path, layout: str, file: Path) -> Path:
    """Write the file, unless it is there already; its Q4_1 blocks become ``layout``, all else stays.

    Returns:
        The file.
    """
    if file.is_file():
        return file
    kind = GGMLQuantizationType[layout]
    model = GGUFReader(source)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    writer = GGUFWriter(part, arch=str(model.fields["general.architecture"].contents()))
    for field in model.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            item = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=item)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{layout}"])
    for tensor in model.tensors:
        data, theirs = tensor.data, tensor.tensor_type
        if theirs == GGMLQuantizationType.Q4_1:
            data, theirs = quantize(dequantize(data, theirs), kind), kind
        writer.add_tensor(tensor.name, data, raw_dtype=theirs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.rename(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="an alias or a .gguf file")
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    print(requantise(resolve(arguments.model, progress=True).path, arguments.layout, arguments.file))


if __name__ == "__main__":
    main()
