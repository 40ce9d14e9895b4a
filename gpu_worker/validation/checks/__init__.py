"""The numbered checks of a validation, each in its own module. They run in the child."""
