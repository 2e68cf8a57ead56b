package relay

import (
	"testing"
	"unsafe"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// boardTools are the tools of a board with these capabilities.
func boardTools(t *testing.T, nodeID string, caps ...manifest.Capability) (list []manifest.Tool) {
	t.Helper()
	for i := range caps {
		tools, err := manifest.Project(nodeID, &caps[i])
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, tools...)
	}
	return list
}

// The tools of two boards share their descriptions, but for what differs: a name that a board chose
// is in no list, and a board that is offline says so before it looks at arguments.
func TestToolInfoIsShared(t *testing.T) {
	const nodeA, nodeB = "01hzx9k3m4p7q8r9s0t1v2w3xy", "01hzx9k3m4p7q8r9s0t1v2w3xz"
	chosen := manifest.Echo()
	chosen.CapID = "parrot"
	a, b := boardTools(t, nodeA, manifest.Echo(), manifest.Metrics()), boardTools(t, nodeB, manifest.Echo(), manifest.Metrics(), chosen)
	for i := range a {
		info := deviceToolInfo(&a[i], false)
		if info != deviceToolInfo(&b[i], false) {
			t.Errorf("%s and %s have two descriptions", a[i].Canonical, b[i].Canonical)
		}
		if info.Title != a[i].Verb.Title || info.Unlisted || info.SafetyClass != a[i].Capability.SafetyClass {
			t.Errorf("%s: %+v", a[i].Canonical, info)
		}
		if _, err := info.CheckArguments([]byte(`{"no":1}`)); manifest.AsError(err).Code != manifest.ManifestInvalid {
			t.Errorf("%s: wrong arguments: %v", a[i].Canonical, err)
		}
		offline := deviceToolInfo(&a[i], true)
		if _, err := offline.CheckArguments([]byte(`{"no":1}`)); manifest.AsError(err).Code != manifest.NodeOffline {
			t.Errorf("%s, offline: %v", a[i].Canonical, err)
		}
	}
	if parrot := deviceToolInfo(&b[len(b)-1], false); !parrot.Unlisted || parrot == deviceToolInfo(&a[0], false) {
		t.Errorf("a name of the board's choice: %+v", parrot)
	}
}

// A relay has one of each for every tool of every board.
func TestToolSize(t *testing.T) {
	if size := unsafe.Sizeof(kernel.Tool{}); size > 48 {
		t.Errorf("a kernel.Tool has %d bytes", size)
	}
	if size := unsafe.Sizeof(manifest.Tool{}); size > 40 {
		t.Errorf("a manifest.Tool has %d bytes", size)
	}
	if size := unsafe.Sizeof(manifest.Limit{}); size > 24 {
		t.Errorf("a manifest.Limit has %d bytes", size)
	}
}
