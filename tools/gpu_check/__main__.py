"""`python3 -m gpu_check --kit KIT --out OUT`: checks and times the CUDA kernels of a kit on this machine's GPU."""

import argparse
import signal
import sys
import traceback

from . import table
from .arguments import words
from .conductor import BUDGET, CHECK_SHARE, STAGES, Run


def main():
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--kit", required=True, help="folder that `cargo xtask gpu-check` prepared")
    parser.add_argument("--out", required=True, help="folder for results.json, table.txt and log.txt")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of the whole run (default %(default).0f)")
    parser.add_argument(
        "--check-share", type=float, default=CHECK_SHARE, help="share of it that checks have (default %(default)s)"
    )
    parser.add_argument("--without", default="", help="rivals that are not timed, such as upstream-compiled")
    parser.add_argument("--stages", type=words(STAGES), default=STAGES, help=f"some of {','.join(STAGES)}")
    options = parser.parse_args()
    # Ends what was started, as an interrupt does; what was found is on disk.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run = Run(options.kit, options.out, options.budget, options.stages, options.check_share, options.without)
    try:
        run.everything()
    except Exception:  # noqa: BLE001 — what was found until now is still worth its table.
        traceback.print_exc()
        run.results["lost"].append(traceback.format_exc().splitlines()[-1])
        run.save()
        run.keep_logs()
    print(run.rendered())
    return 1 if table.is_wrong(run.results, options.stages) else 0


if __name__ == "__main__":
    sys.exit(main())
