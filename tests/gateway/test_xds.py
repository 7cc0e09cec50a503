from gateway import xds
from gateway.xds import Rendering

CLUSTER = {"name": "up", "type": "EDS", "eds_cluster_config": {}}
LISTENER = {"name": "l", "filter_chains": [{"filters": [{"typed_config": {"rds": {"route_config_name": "t"}}}]}]}
RENDERING = Rendering((LISTENER,), {"t": {"name": "t"}}, {"up": CLUSTER}, {"up": {"cluster_name": "up"}})


def test_the_static_form_holds_everything_inline_and_leaves_the_rendering_alone() -> None:
    static = RENDERING.static()["static_resources"]
    assert static["listeners"][0]["filter_chains"][0]["filters"] == [{"typed_config": {"route_config": {"name": "t"}}}]
    assert static["clusters"] == [{"name": "up", "type": "STATIC", "load_assignment": {"cluster_name": "up"}}]
    assert LISTENER["filter_chains"][0]["filters"][0]["typed_config"] == {"rds": {"route_config_name": "t"}}  # type: ignore[index]


def test_each_kind_has_its_file_and_the_readout_that_confirms_it() -> None:
    assert {name: file.stat for name, file in RENDERING.files().items()} == {
        xds.LDS: "listener_manager.lds.version_text",
        xds.CDS: "cluster_manager.cds.version_text",
        xds.rds("t"): "http.t.rds.t.version_text",
        xds.eds("up"): "cluster.up.version_text",
    }


def test_clusters_that_are_leaving_can_be_kept() -> None:
    kept = Rendering(clusters={"new": {"name": "new"}}).cluster_file(also={"old": {"name": "old"}})
    assert '"old"' in kept[xds.CDS].text
    assert '"new"' in kept[xds.CDS].text
