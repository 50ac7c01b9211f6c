"""Pure deciders: `(state, event, now) -> (state, effects)`. No IO, no clock, no logging."""
