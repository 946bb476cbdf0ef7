"""What moves with a release: requirements, locks, other upstreams, and the trial of all of it."""
