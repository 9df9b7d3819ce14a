"""The audit: a check, which anybody can run, that speculation changes nothing on their model and their machine.

What it finds are ``report.Check``s; ``session.audit`` runs them on a model, ``server.audit`` on servers. Nothing that did
not run is called passed, and a set of deliberately broken engines must be caught each time, or the audit itself has failed.
"""
