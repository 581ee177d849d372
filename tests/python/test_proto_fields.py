"""Compares every field of src/onnx/proto.rs with the descriptors of the `onnx` package."""

import pathlib
import re
import unittest

import onnx

SOURCE = pathlib.Path(__file__).parents[2] / "src" / "onnx" / "proto.rs"

WIRE_TYPES = {
    "double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "string": 9, "message": 11, "bytes": 12,
    "enumeration": 14,
}



def snake(name):
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def rust_messages():
    """Fields of each message by its dotted ONNX name, and the numbers of each enumeration."""
    text = SOURCE.read_text(encoding="utf-8")
    messages, enumerations, path, depth, current = {}, {}, [], 0, None
    attribute = None
    for line in text.splitlines():
        code = line.strip()
        if match := re.match(r"pub mod (\w+) \{", code):
            path.append((match[1], depth))
        elif match := re.match(r"pub (struct|enum) (\w+) \{", code):
            parts = [name for name, _ in path] + [match[2]]
            current = (".".join(parts), depth)
        elif match := re.match(r"#\[prost\((.*)\)\]", code):
            attribute = match[1]
        elif attribute is not None:
            name = re.match(r"(?:pub )?(?:r#)?(\w+)", code)[1]
            messages.setdefault(current[0], []).append((name, attribute))
            attribute = None
        elif current and (match := re.match(r"(\w+) = (\d+),", code)):
            enumerations.setdefault(current[0], {})[match[1]] = int(match[2])
        depth += code.count("{") - code.count("}")
        if current and depth <= current[1]:
            current = None
        while path and depth <= path[-1][1]:
            path.pop()
    return messages, enumerations


def descriptor(dotted):
    """The descriptor that a Rust path such as `tensor_shape_proto.Dimension` names."""
    *outer, name = dotted.split(".")
    known = {snake(message): message for message in dir(onnx) if message.endswith("Proto")}
    found = None
    for part in outer:
        found = getattr(onnx, known[part]).DESCRIPTOR if found is None else {
            snake(nested.name): nested for nested in found.nested_types
        }[part]
    if found is None:
        return getattr(onnx, name).DESCRIPTOR
    nested = {message.name: message for message in found.nested_types}
    nested.update({enum.name: enum for enum in found.enum_types})
    return nested.get(name, found)


class ProtoFields(unittest.TestCase):
    def setUp(self):
        self.messages, self.enumerations = rust_messages()

    def test_every_message_is_found(self):
        source = SOURCE.read_text(encoding="utf-8")
        derived = len(re.findall(r"prost::(?:Message|Oneof)\)\]", source))
        self.assertEqual(len(self.messages), derived)
        self.assertEqual(len(self.enumerations), len(re.findall(r"prost::Enumeration\)\]", source)))

    def test_fields(self):
        checked = 0
        for message, fields in self.messages.items():
            theirs = {field.name: field for field in descriptor(message).fields}
            for name, attribute in fields:
                with self.subTest(message=message, field=name):
                    checked += self.check_field(theirs, message, name, attribute)
        self.assertEqual(checked, SOURCE.read_text(encoding="utf-8").count("#[prost("))

    def check_field(self, theirs, message, name, attribute):
        words = [word.strip() for word in re.split(r",(?![^\"]*\"(?:,|$))", attribute)]
        tags = [int(tag) for tag in re.search(r"tags? = \"([\d, ]+)\"", attribute)[1].split(",")]
        if words[0].startswith("oneof"):
            members = {field.number for field in theirs.values() if field.containing_oneof}
            self.assertLessEqual(set(tags), members)
            return 1
        field = theirs[snake(name)]
        kind = words[0].split(" ")[0]
        self.assertEqual([field.number], tags)
        self.assertEqual(field.type, WIRE_TYPES[kind])
        self.assertEqual(field.is_repeated, "repeated" in words)
        if kind == "enumeration":
            rust_enum = re.search(r"enumeration = \"(\w+)::(\w+)\"", attribute)
            self.assertEqual(field.enum_type.name, rust_enum[2])
        numeric = kind not in ("string", "message", "bytes")
        if field.is_repeated and numeric:
            self.assertEqual(field.is_packed, "packed = \"false\"" not in words)
        return 1

    def test_enumerations(self):
        for dotted, values in self.enumerations.items():
            theirs = {value.name.replace("_", "").lower(): value.number for value in descriptor(dotted).values}
            ours = {name.lower(): number for name, number in values.items()}
            with self.subTest(enumeration=dotted):
                self.assertEqual(ours, theirs)


if __name__ == "__main__":
    unittest.main()
