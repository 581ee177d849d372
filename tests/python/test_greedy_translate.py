"""examples/greedy_translate.py gives what upstream's own generator gives."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from exports import DATA, export, read_json, setting

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "greedy_translate.py"
sys.path.insert(0, str(SCRIPT.parent))

from greedy_translate import Tokenizer, Translator

TOKENS = ["--dict", str(DATA / "nmt" / "dict.txt"), "--codes", str(DATA / "nmt" / "bpe.codes")]


class GreedyTranslate(unittest.TestCase):
    def setUp(self):
        self.items = read_json("nmt/generation.json")["items"]
        self.tokenizer = Tokenizer(DATA / "nmt" / "dict.txt", DATA / "nmt" / "bpe.codes")

    def test_words_become_upstreams_tokens_and_back(self):
        for item in self.items:
            with self.subTest(source=item["source"]):
                self.assertEqual(self.tokenizer.encode(item["source"]), item["source_tokens"])
                self.assertEqual(self.tokenizer.decode(item["reference_tokens"]), item["reference"])

    def test_separators_of_unicode_are_symbols(self):
        separators = ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"]
        with tempfile.TemporaryDirectory() as folder:
            dictionary, codes = pathlib.Path(folder, "dict.txt"), pathlib.Path(folder, "bpe.codes")
            dictionary.write_bytes("".join(f"{mark}@@ 9\n" for mark in separators).encode() + b"last 1\r\n")
            merges = "".join(f"{mark} x</w>\n" for mark in separators)
            codes.write_bytes(f"#version: 0.2\n{merges}".encode())
            tokenizer = Tokenizer(dictionary, codes)
        self.assertEqual(tokenizer.tokens[4:], [f"{mark}@@" for mark in separators] + ["last"])
        self.assertEqual(tokenizer.ids["last"], 4 + len(separators))
        for mark in separators:
            self.assertEqual(tokenizer.pieces(f"{mark}x"), [f"{mark}x"])

    def dictionary(self, text):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "dict.txt")
            path.write_text(text, encoding="utf-8")
            return Tokenizer(path)

    def test_a_token_that_comes_again_is_marked(self):
        tokenizer = self.dictionary("a 1\nb 2\na 3 #fairseq:overwrite\n<s> 1 #fairseq:overwrite\n")
        self.assertEqual(tokenizer.tokens[4:], ["a", "b", "a", "<s>"])
        self.assertEqual(tokenizer.encode("a b <s> </s>"), [6, 5, 7, 3, 2])
        for text, what in [
            ("a 1\na 2\n", "line 2: token 'a' is there already"),
            ("a 1\n<pad> 2\n", "line 2: token '<pad>' is there already"),
            ("a 1\n\n", "line 2: expected a token and its count"),
            ("a\n", "line 1: expected a token and its count"),
            ("12\n", "line 1: expected a token and its count"),
            ("a #fairseq:overwrite\n", "line 1: expected a token and its count"),
            ("a b #overwrite\n", "line 1: expected a token and its count"),
        ]:
            with self.subTest(text=text), self.assertRaisesRegex(ValueError, what):
                self.dictionary(text)

    def test_begin_is_no_word(self):
        tokenizer = self.dictionary("a 1\nb 2\n")
        self.assertEqual(tokenizer.decode([0, 4, 0, 5, 2, 4]), "a b")

    def test_a_sentence_may_end_inside_a_word(self):
        part = next(number for number, token in enumerate(self.tokenizer.tokens) if token.endswith("@@"))
        self.assertEqual(self.tokenizer.decode([part, part]), 2 * self.tokenizer.tokens[part][:-2])

    def test_translations_are_upstreams(self):
        for form, library in [("function", setting("MOA_ORT_LIBRARY")), ("function", None), ("standard", None)]:
            with self.subTest(form=form, library=library is not None):
                translator = Translator(export("nmt", form), library)
                found = translator.translate([item["source_tokens"] for item in self.items])
                self.assertEqual(found, [item["greedy"]["tokens"] for item in self.items])

    def test_numbers_that_training_never_saw(self):
        lines = (DATA / "nmt" / "unseen_pairs.tsv").read_text(encoding="utf-8").splitlines()[:200]
        pairs = [line.split("\t")[1:] for line in lines]
        translator = Translator(export("nmt", "function"), setting("MOA_ORT_LIBRARY"))
        found = translator.translate([self.tokenizer.encode(english) for english, _ in pairs])
        right = [german == self.tokenizer.decode(tokens) for (_, german), tokens in zip(pairs, found)]
        self.assertGreaterEqual(sum(right), 198)

    def command(self, *words, lines=b"", locale="C.UTF-8"):
        command = [sys.executable, str(SCRIPT), str(export("nmt", "function")), *words]
        environment = os.environ | {"LC_ALL": locale}
        done = subprocess.run(command, input=lines, capture_output=True, env=environment)
        done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
        return done

    def test_the_command_prints_source_and_translation(self):
        done = self.command(*TOKENS, "--library", setting("MOA_ORT_LIBRARY"), "seven", "one hundred")
        self.assertEqual(done.stderr, "")
        self.assertEqual(done.stdout, "seven\tsieben\none hundred\teinhundert\n")

    def test_lines_are_read_in_utf_8_whatever_the_locale_says(self):
        for locale in ["C.UTF-8", "C", "POSIX"]:
            with self.subTest(locale=locale):
                done = self.command(*TOKENS, lines="\ufeffseven\r\n\none \u00fc\n".encode(), locale=locale)
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                first, blank, second = done.stdout.split("\n")[:-1]
                self.assertEqual([first, blank], ["seven\tsieben", ""])
                self.assertTrue(second.startswith("one \u00fc\t"), second)

    def test_blank_lines_stay_blank(self):
        lines = ["\n"] * 64 + ["seven\n", " \t\n", "one hundred"]
        done = self.command(*TOKENS, lines="".join(lines).encode())
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(done.stdout, "\n" * 64 + "seven\tsieben\n\none hundred\teinhundert\n")

    def test_what_is_not_utf_8_is_refused_by_its_line(self):
        for locale in ["C.UTF-8", "C"]:
            with self.subTest(locale=locale):
                done = self.command(*TOKENS, lines=b"seven\n\xfcber\n", locale=locale)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                self.assertIn("error: line 2 of the standard input is not UTF-8: ", done.stderr)
                self.assertNotIn("Traceback", done.stderr)
                done = self.command(*TOKENS, b"\xfcber", locale=locale)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                self.assertNotIn("Traceback", done.stderr)

    def test_the_command_says_what_is_missing(self):
        for words, message in [
            ([*TOKENS, "--library", "no.so", "seven"], "no.so is not there"),
            (TOKENS, "there is nothing to translate"),
            ([*TOKENS, " "], "there is nothing to translate"),
        ]:
            done = self.command(*words)
            self.assertEqual(done.returncode, 2)
            self.assertIn(message, done.stderr)


if __name__ == "__main__":
    unittest.main()
