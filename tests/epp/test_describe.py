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


def test_a_pipeline_in_words() -> None:
    assert describe(loaded(CONFIG)) == EXPECTED
