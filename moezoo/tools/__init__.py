"""Tools around models: nothing of the library imports them, only the entry point and `moezoo.analysis`.

- `commands`: all commands by name, those of `moezoo.cli` too;
- `plan`: whether a configuration fits on devices that are not here, and how fast it can be;
- `sharding`: what each device stores, receives and keeps;
- `doctor`: what is installed, and whether two steps on the devices here agree;
- `sweep`, `compare`: a run for each combination of settings; runs side by side;
- `routing`: to which experts the tokens of a text go;
- `parity`: a folder, compared with transformers module by module.
"""
