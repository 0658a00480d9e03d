"""`python -m serve MODEL ...`: the server alone, for a place where the rest of potstill is not installed."""

import argparse
import sys

from serve.http.options import add_serve_arguments, options_from_arguments


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m serve", description="Serve a model over HTTP as OpenAI does.")
    add_serve_arguments(parser)
    try:
        options = options_from_arguments(parser.parse_args())
        if options.replicas is not None:
            from serve.cluster import run_cluster

            return run_cluster(options)
        from serve.http.server import run_server

        return run_server(options)
    except (ValueError, OSError) as error:
        print(f"potstill: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
