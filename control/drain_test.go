//go:build linux

package control

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// TestDrainNewcomer checks that a client which connected just before the daemon stops has
// newConnGrace to send its request, and that an idle one is disconnected at once.
func TestDrainNewcomer(t *testing.T) {
	status := func(context.Context) any { return map[string]bool{"done": true} }
	inBubble(t, Options{Status: status}, func(t *testing.T, r *rig) {
		idle := r.peer().hello("")
		time.Sleep(newConnGrace)
		fresh, silent := r.peer(), r.peer()
		synctest.Wait()
		began := time.Now()
		ended := make(chan struct{})
		go func() { r.end(); close(ended) }()
		synctest.Wait()
		select {
		case <-idle.ended:
		default:
			t.Error("an idle client holds the stop up")
		}
		time.Sleep(newConnGrace / 2)
		fresh.hello("")
		if got := fresh.ok("status", "null"); got["done"] != true {
			t.Errorf("a newcomer got %v", got)
		}
		<-silent.ended
		<-fresh.ended
		<-ended
		if took := time.Since(began); took != newConnGrace {
			t.Errorf("the stop took %v, want %v", took, newConnGrace)
		}
	})
}
