"""FirstCome, `fcfs`: first come, first served.

By arrival; the last to arrive is preempted first and, having arrived before later ones, returns
before them. Every part is the default of `Policy`.
"""

from quire.scheduler.policy.policy import Policy


class FirstCome(Policy):
    """The default of every part of a policy."""
