"""The end-to-end comparison behind ``benches/compare.py``.

``workloads`` is what is saved, ``peers`` who saves it, ``raw_limits`` what the machine allows;
``measure``, ``loop`` and ``repository`` are how it is timed, ``ratios`` how small a state gets that
``language_model`` trained, ``training`` what the training layer adds to a plain loop, each in a process
of its own through ``worker``; ``summary``, ``figures`` and ``report`` make what is printed. Speed is
reported and never asserted; that every load gives back the saved bytes is asserted.
"""
