"""What `warmpath check` prints: the pipeline in order, every parameter, what was added."""

from epp.describe import describe
from tests.support.pipelines import loaded

CONFIG = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- {name: warm, type: tests.support.plugins.Warm, parameters: {wait: 200ms, names: [a], steps: [{at: 1}]}}
- {type: tests.support.plugins.All, name: all}
- {type: tests.support.plugins.OwnMatch, name: match}
- {type: tests.support.plugins.Watching, name: watching}
- {type: queue-scorer}
schedulingProfiles:
- name: main
  plugins: [{pluginRef: warm, weight: 2.5}, {pluginRef: all}]
"""

EXPECTED = """\
admission     detector utilization-detector queueDepthThreshold=5, kvCacheUtilThreshold=0.8, \
metricsStalenessThreshold=5s, headroom=0.0  [added: the default]
signals       PrefixMatch from match (tests.support.plugins.OwnMatch)
profiles      handler single-profile-handler  [added: there is one profile]
profile main  filter all (tests.support.plugins.All)
profile main  scorer, weight 2.5: warm (tests.support.plugins.Warm) floor=0.1, count=1, strict=false, mode=fast, \
wait=0.2s, names=[a], labels={}, steps=[{at: 1.0, label: none}], maxTTFTMs=null
profile main  picker max-score-picker maxNumOfEndpoints=1  [added: profile main has no picker]
hooks         plugin watching (tests.support.plugins.Watching)
not used      plugin queue-scorer"""


SHADOW = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins: [{type: expected-ttft}, {type: queue-scorer}]
schedulingProfiles:
- {name: main, plugins: [{pluginRef: expected-ttft}]}
- {name: new, plugins: [{pluginRef: queue-scorer}]}
shadow: {profile: new, sample: 0.5}
"""


def test_a_shadow_in_words() -> None:
    text = SHADOW
    lines = [line for line in describe(loaded(text)).splitlines() if line.startswith("shadow new")]
    assert lines == [
        "shadow new    picks for 0.5 of the requests, priced by expected-ttft",
        "shadow new    scorer, weight 1: queue-scorer",
        "shadow new    picker new-picker (max-score-picker) maxNumOfEndpoints=1  [added: profile new has no picker]",
    ]


def test_a_pipeline_in_words() -> None:
    assert describe(loaded(CONFIG)) == EXPECTED
