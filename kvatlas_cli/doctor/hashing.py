"""Whether this installation hashes token ids by compiled code. All processes of one image do as this command does."""

from kvatlas_cli.doctor.finding import Finding, Level

CHECK = "installation.hashing"


def judge_hashing(*, compiled: bool) -> Finding:
    if compiled:
        return Finding(CHECK, Level.OK, "this installation hashes token ids by compiled code")
    return Finding(
        CHECK,
        Level.INFO,
        "this installation hashes token ids in Python, because it was built without a C compiler or for another machine",
        "routers and publishers work, but take more CPU time; install gcc and Python's headers, then reinstall kvatlas",
    )
