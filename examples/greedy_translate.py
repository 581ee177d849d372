#!/usr/bin/env python3
"""Translates sentences with an exported encoder-decoder, on plain ONNX Runtime and NumPy.

The folder holds encoder_model.onnx, decoder_model.onnx and, as generation.json says, the vocabulary, as
`moa-export` writes them. Dictionaries are fairseq's (one token a line), codes are subword-nmt's (version 0.2).
Each sentence gives one line on the standard output: source, tab, translation. A blank one gives an empty line.

    python3 greedy_translate.py FOLDER 'nine hundred'
    python3 greedy_translate.py FOLDER --library libmoa_ort.so < sentences.txt
"""

import argparse
import json
import os
import pathlib
import sys

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
try:
    import numpy as np
    import onnxruntime
except ImportError as error:
    sys.exit(f"{error}; install it with: python3 -m pip install onnxruntime numpy")

SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
BEGIN, PAD, END, UNKNOWN = range(4)

# Ends a line of a dictionary whose token may be there already.
OVERWRITE = " #fairseq:overwrite"

# Sentences that are translated at once.
BATCH = 64


def read_lines(path):
    """The lines of a file, which end with a line feed alone: other separators of Unicode are symbols."""
    with open(path, encoding="utf-8", newline="\n") as lines:
        return [line.rstrip("\r\n") for line in lines]


def read_tokens(dictionary):
    """The tokens of a fairseq dictionary by id; one that comes again is marked, and its last id is that of the word."""
    tokens = list(SPECIAL_TOKENS)
    known = set(tokens)
    for number, line in enumerate(read_lines(dictionary), 1):
        entry = line.rstrip().removesuffix(OVERWRITE)
        token, space, count = entry.rpartition(" ")
        if not space or not count.removeprefix("-").isdecimal():
            raise ValueError(f"{dictionary}, line {number}: expected a token and its count, found {line!r}")
        if token in known and entry == line.rstrip():
            raise ValueError(f"{dictionary}, line {number}: token {token!r} is there already")
        tokens.append(token)
        known.add(token)
    return tokens


class Tokenizer:
    """Words to subword ids and back; without codes, every word is a token."""

    def __init__(self, dictionary, codes=None, target_dictionary=None):
        self.tokens = read_tokens(target_dictionary or dictionary)
        tokens = enumerate(read_tokens(dictionary))
        self.ids = {token: number for number, token in tokens if number >= len(SPECIAL_TOKENS)}
        self.ranks = None
        if codes is None:
            return
        lines = read_lines(codes)
        if not lines or not lines[0].startswith("#version: 0.2"):
            raise ValueError(f"{codes} does not begin with `#version: 0.2`")
        self.ranks = {}
        for line in lines[1:]:
            self.ranks.setdefault(tuple(line.strip(" ").split(" ")), len(self.ranks))

    def pieces(self, word):
        """The subwords of one word; all but the last end in `@@`."""
        if self.ranks is None:
            return [word]
        symbols = [*word[:-1], word[-1] + "</w>"]
        while True:
            pairs = set(zip(symbols, symbols[1:])) & self.ranks.keys()
            if not pairs:
                break
            first, second = min(pairs, key=self.ranks.get)
            merged, index = [], 0
            while index < len(symbols):
                if symbols[index : index + 2] == [first, second]:
                    merged.append(first + second)
                    index += 2
                else:
                    merged.append(symbols[index])
                    index += 1
            symbols = merged
        return [symbol + "@@" for symbol in symbols[:-1]] + [symbols[-1][: -len("</w>")]]

    def encode(self, sentence):
        """The ids of a sentence, its end included."""
        pieces = [piece for word in sentence.split() for piece in self.pieces(word)]
        return [self.ids.get(piece, UNKNOWN) for piece in pieces] + [END]

    def decode(self, ids):
        """The sentence of these ids, up to its end and without a begin."""
        ids = list(ids)
        ids = ids[: ids.index(END)] if END in ids else ids
        return (" ".join(self.tokens[number] for number in ids if number != BEGIN) + " ").replace("@@ ", "").rstrip()


def read_vocabulary(folder):
    """The tokenizer that generation.json of an export describes."""
    config = json.loads((folder / "generation.json").read_text(encoding="utf-8"))
    if config["tokenizer"] not in ("bpe", "words"):
        raise ValueError(f"tokenizer {config['tokenizer']!r} is not for this example")
    codes = config["bpe_codes"] and folder / config["bpe_codes"]
    return Tokenizer(folder / config["source_dictionary"], codes, folder / config["target_dictionary"])


class Translator:
    """The two sessions of an export."""

    def __init__(self, folder, library=None, threads=0):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        if library:
            options.register_custom_ops_library(str(library))
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(
                str(pathlib.Path(folder) / f"{part}_model.onnx"), options, providers=["CPUExecutionProvider"]
            )
            for part in ("encoder", "decoder")
        )

    def vocabulary(self):
        """How many tokens the decoder chooses from."""
        return next(output.shape[-1] for output in self.decoder.get_outputs() if output.name == "logits")

    def translate(self, sources, max_tokens=200):
        """The best next token again and again, for a batch of id lists; each result ends with END if it ended."""
        length = max(map(len, sources))
        input_ids = np.array([[PAD] * (length - len(source)) + source for source in sources], np.int64)
        source_mask = (input_ids != PAD).astype(np.int64)
        encoded = run(self.encoder, {"input_ids": input_ids, "attention_mask": source_mask})
        caches = {name: value for name, value in as_inputs(encoded).items() if ".encoder." in name}
        for value in self.decoder.get_inputs():
            if ".decoder." in value.name:
                _, heads, _, width = value.shape
                kind = np.float16 if value.type == "tensor(float16)" else np.float32
                caches[value.name] = np.zeros((len(sources), heads, 0, width), kind)
        results = [[] for _ in sources]
        tokens = np.full((len(sources), 1), END, np.int64)
        mask = np.ones((len(sources), 1), np.int64)
        for step in range(max_tokens):
            feeds = {"input_ids": tokens, "attention_mask": mask, "encoder_attention_mask": source_mask, **caches}
            outputs = run(self.decoder, feeds)
            caches.update(as_inputs(outputs))
            scores = outputs["logits"][:, -1]
            scores[:, PAD] = -np.inf
            if step == 0:
                scores[:, END] = -np.inf
            running = np.array([END not in result for result in results])
            chosen = np.where(running, scores.argmax(axis=-1), PAD)
            for result, token in zip(results, chosen):
                if token != PAD:
                    result.append(int(token))
            if all(END in result for result in results):
                break
            tokens = chosen[:, None].astype(np.int64)
            mask = np.concatenate([mask, (tokens != PAD).astype(np.int64)], axis=1)
        return results


def run(session, feeds):
    """All outputs of a session by name."""
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds)))


def as_inputs(outputs):
    """The caches among the outputs, under the names that the decoder takes them by."""
    return {name.replace("present.", "past_key_values."): x for name, x in outputs.items() if name.startswith("present.")}


def read_sentences(file):
    """The lines of a binary file in UTF-8, whatever the locale says, without the mark that may begin it."""
    sentences = []
    for number, line in enumerate(file, 1):
        try:
            sentences.append(line.decode("utf-8-sig" if number == 1 else "utf-8").strip())
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} of the standard input is not UTF-8: {error}") from error
    return sentences


def natural(text):
    """A number from 0, for an option."""
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def main():
    parser = argparse.ArgumentParser(description="Translate sentences with an exported encoder-decoder.")
    parser.add_argument("folder", type=pathlib.Path, help="folder with encoder_model.onnx and decoder_model.onnx")
    parser.add_argument("sentences", nargs="*", help="what to translate; without any, the lines of the standard input, in UTF-8")
    parser.add_argument("--dict", type=pathlib.Path, help="fairseq dictionary (default: as generation.json says)")
    parser.add_argument("--codes", type=pathlib.Path, help="subword-nmt codes, with --dict")
    parser.add_argument("--library", type=pathlib.Path, help="operator library (libmoa_ort.so), for speed")
    parser.add_argument("--threads", type=natural, default=0, help="threads of ONNX Runtime (default: all cores)")
    parser.add_argument("--max-tokens", type=natural, default=200, help="longest translation (default: 200)")
    arguments = parser.parse_intermixed_args()
    models = [arguments.folder / f"{part}_model.onnx" for part in ("encoder", "decoder")]
    if arguments.codes and not arguments.dict:
        parser.error("--codes goes with --dict")
    vocabulary = [arguments.dict, arguments.codes] if arguments.dict else [arguments.folder / "generation.json"]
    for path in [*models, *filter(None, [*vocabulary, arguments.library])]:
        if not path.is_file():
            parser.error(f"{path} is not there")
    try:
        tokenizer = Tokenizer(*vocabulary) if arguments.dict else read_vocabulary(arguments.folder)
    except (ValueError, KeyError, TypeError, OSError) as error:
        parser.error(str(error))
    try:
        for sentence in arguments.sentences:
            sentence.encode()
        sentences = arguments.sentences or read_sentences(sys.stdin.buffer)
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.reconfigure(encoding="utf-8")
    if not any(map(str.strip, sentences)):
        parser.error("there is nothing to translate")
    try:
        translator = Translator(arguments.folder, arguments.library and arguments.library.resolve(), arguments.threads)
        if translator.vocabulary() != len(tokenizer.tokens):
            sys.exit(f"the model has {translator.vocabulary()} tokens, and its dictionary {len(tokenizer.tokens)}")
        for first in range(0, len(sentences), BATCH):
            batch = sentences[first : first + BATCH]
            sources = [tokenizer.encode(sentence) for sentence in batch if sentence.strip()]
            results = iter(translator.translate(sources, arguments.max_tokens) if sources else [])
            for sentence in batch:
                print(f"{sentence}\t{tokenizer.decode(next(results))}" if sentence.strip() else "")
    except BrokenPipeError:
        raise
    except Exception as error:  # Those of ONNX Runtime have no other class in common.
        sys.exit(f"{error}\nA model of the form fused needs --library, and sentences fit its positions.")


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
