"""Arguments that several programs of this folder take."""

import argparse


def words(known):
    """Reads names of `known` with commas between them."""

    def read(text):
        if unknown := [word for word in text.split(",") if word not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(known)}")
        return text.split(",")

    return read
