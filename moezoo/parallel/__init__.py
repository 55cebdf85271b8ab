"""Where arrays lie and what moves: mesh, axes, rules, execution, collectives, and what they bring a device."""
