"""Settings of a run that are refused before anything is computed: one line with the key."""

from refusals import by_table, refused

import moezoo
from moezoo.tools.sharding.describe import describe


@by_table(
    """
    words => line
    steps=5 epochs=2 => steps=5 epochs=2: each says how long the run is; leave one of them out
    steps=null => steps=null epochs=null: nothing says how long the run is; set one of them
    epochs=0 => epochs=0 must be at least 1
    eval_patience=2 eval_every=0 => eval_patience=2 needs evaluations during the run and eval_every=0 has one at its end
    resume=auto => resume=auto ... run_dir=FOLDER
    steps=5 profile.start=4 => profile.start=4 profile.steps=3 ends with step 6 and steps=5; begin earlier
    steps=5 profile.start=0 => profile.start=0
    steps=5 profile.steps=0 => profile.steps=0
    steps=5 profile.stop=3 => profile.stop
    frozen=['*'] => frozen=[*] leaves nothing to train
    trained=[] => trained=[] leaves nothing to train
    trained=['*.query'] frozen=['*.attention.*'] => trained=[*.query] frozen=[*.attention.*] leaves nothing
    frozen=['*.attention.querry'] => frozen: *.attention.querry matches no whole path ... '*.attention.query'
    trained=['*.atention.*'] => trained: *.atention.* matches no whole path ... ; did you mean '*.attention.*'?
    trained=['atention.querry'] => trained: atention.querry ... ; did you mean '*attention.query'?
    trained=[embedding] => trained: embedding matches no whole path of a parameter; write *embedding*
    model=deepseek trained=['*.choice_bias'] => trained: *.choice_bias matches only ... a buffer
    model=deepseek frozen=['*.choice_bias'] => frozen: *.choice_bias matches only ... a buffer
    """
)
def test_settings(words, line):
    with refused(line):
        describe(moezoo.compose(*words.split()), parts="parameters")
