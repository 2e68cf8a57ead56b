package relay

import (
	"context"
	"errors"
	"testing"

	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/hub"
	"agentctl/relay/storage"
)

func TestRegistryRetriesKeepTheNewest(t *testing.T) {
	t.Parallel()
	var q registryRetries
	older, newer := new(hub.Node), new(hub.Node)
	q.put("a", registryWrite{node: older})
	q.put("a", registryWrite{boot: "boot-1"})
	retried := q.get("a")
	if retried != (registryWrite{older, "boot-1"}) {
		t.Fatalf("get: %v", retried)
	}
	q.put("a", registryWrite{node: newer}) // a second link, which fails to be stored while the first one's values are
	q.drop("a", retried)
	if got := q.get("a"); got != (registryWrite{node: newer}) {
		t.Errorf("after the retry: %v", got)
	}
	q.drop("a", registryWrite{node: newer})
	if got := q.all(); len(got) != 0 {
		t.Errorf("boards that lack something: %v", got)
	}
}

// A link whose boot_id is stored right away ends the retries for the link before it.
func TestRegistryRetryOfAnEarlierLink(t *testing.T) {
	t.Parallel()
	s, err := auth.Open(auth.Options{StateDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	r := &Relay{store: s, log: zap.NewNop(), storage: storage.New(storage.Options{Logger: zap.NewNop()}), hub: hub.New(hub.Options{})}
	ctx, nodeID := context.Background(), manifest.NewNodeID()
	if _, err := s.UpsertNode(ctx, auth.DefaultTenant, nodeID, "", nil); err != nil {
		t.Fatal(err)
	}
	r.registryFailed(nodeID, registryWrite{boot: "boot-1"}, &storage.Error{Store: storeIdentities, Kind: storage.Hung, Err: errors.New("hangs")})
	r.saveBoot(nodeID, "boot-2")
	for id := range r.registry.all() {
		r.retryBoard(ctx, id)
	}
	if got := s.Served(nodeID).BootID; got != "boot-2" {
		t.Errorf("the registry has the boot_id %q of an earlier link", got)
	}
	r.registryFailed(nodeID, registryWrite{boot: "boot-3"}, &storage.Error{Store: storeIdentities, Kind: storage.Hung, Err: errors.New("hangs")})
	r.retryBoard(ctx, nodeID)
	if got := s.Served(nodeID).BootID; got != "boot-3" || len(r.registry.all()) != 0 {
		t.Errorf("after the retry: boot_id %q, pending %v", got, r.registry.all())
	}
}
