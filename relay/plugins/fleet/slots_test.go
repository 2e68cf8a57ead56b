package fleet

import (
	"context"
	"testing"

	"agentctl/manifest"
)

// A panic while a board is asked becomes one of the call, which the kernel turns into an error. The slots are
// free afterwards.
func TestPanicWhileAsking(t *testing.T) {
	f := newFleet(3)
	for i := range f.boards {
		f.answers[nodeID(i)] = func(context.Context, manifest.ToolName, []byte) (string, error) { panic("a fault") }
	}
	p := f.plugin()
	defer func() {
		if recover() == nil {
			t.Error("the panic did not reach the kernel")
		}
		if n := len(p.slots.tenants); n != 0 {
			t.Errorf("slots of %d tenants are in use after the call", n)
		}
	}()
	_, _ = call(t, p, reader, "fleet.find", `{"where":"cpu_pct > 1"}`)
}
