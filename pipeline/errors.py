"""What a user can do wrong, and how a run can end. The command turns each into one sentence and an exit code."""


class UserError(ValueError):
    """A mistake in what the user gave: one sentence that says what is wrong, where, and what would be right."""

    exit_code = 2


class RunLockedError(UserError):
    """Another process runs in the same run folder."""


class GateRefused(Exception):
    """A stage ended below its gate: nothing was published and the stages after it did not run."""

    exit_code = 1


class StageFailed(Exception):
    """A stage could not do its work for a reason that one sentence explains."""

    exit_code = 1


class RunInterrupted(Exception):
    """A signal stopped the run; its state is saved and the same command goes on from there."""

    exit_code = 130
