package kernel_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// A plugin that waits for the relay's disk is not at fault: its caller learns the reason, and its
// breaker stays closed, so that it goes on serving what needs no disk.
func TestDiskIsNoFaultOfThePlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		storage := &manifest.Error{Code: manifest.Internal, Message: "the disk", Reason: "storage"}
		k := kernel.New(kernel.Options{ExplainTimeout: func(plugin string) *manifest.Error {
			if plugin == "zoo" {
				return storage
			}
			return nil
		}})
		p := faultyPlugin()
		var slow atomic.Bool
		slow.Store(true)
		p.call = func(ctx context.Context, _ *kernel.Request) (*kernel.Result, error) {
			if slow.Load() {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return nil, storage
		}
		load(t, k, p)
		for range 10 { // more than a breaker would bear
			wantCode(t, "a call that waits for the disk", callFaulty(k), manifest.Internal, "storage")
		}
		slow.Store(false)
		for range 10 {
			wantCode(t, "a call that the disk refuses", callFaulty(k), manifest.Internal, "storage")
		}
		if s := info(t, k, "zoo").State; s != kernel.StateLoaded {
			t.Errorf("the plugin is %s", s)
		}
	})
}
