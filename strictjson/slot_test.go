package strictjson

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestAcquireSlot: large inputs are read a few at a time, small ones at once.
func TestAcquireSlot(t *testing.T) {
	saved := slots
	defer func() { slots = saved }()
	synctest.Test(t, func(t *testing.T) {
		slots = make(chan struct{}, 2)
		start, done := time.Now(), make(chan time.Duration)
		for range 10 {
			go func() {
				release := AcquireSlot(1 << 20)
				time.Sleep(time.Second)
				release()
				done <- time.Since(start)
			}()
		}
		synctest.Wait()
		AcquireSlot(largeInput)()
		if time.Since(start) != 0 {
			t.Error("a small input waited")
		}
		for i := range 10 {
			if got, want := <-done, time.Duration(i/2+1)*time.Second; got != want {
				t.Errorf("input %d was read after %s, want %s", i, got, want)
			}
		}
	})
	if n := testing.AllocsPerRun(100, func() { AcquireSlot(100)() }); n != 0 {
		t.Errorf("a slot allocates %v times", n)
	}
}
