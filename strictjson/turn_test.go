package strictjson

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestTurn: large inputs are read a few at a time, small ones at once.
func TestTurn(t *testing.T) {
	saved := turns
	defer func() { turns = saved }()
	synctest.Test(t, func(t *testing.T) {
		turns = make(chan struct{}, 2)
		start, done := time.Now(), make(chan time.Duration)
		for range 10 {
			go func() {
				end := Turn(1 << 20)
				time.Sleep(time.Second)
				end()
				done <- time.Since(start)
			}()
		}
		synctest.Wait()
		Turn(largeInput)()
		if time.Since(start) != 0 {
			t.Error("a small input waited")
		}
		for i := range 10 {
			if got, want := <-done, time.Duration(i/2+1)*time.Second; got != want {
				t.Errorf("input %d was read after %s, want %s", i, got, want)
			}
		}
	})
	if n := testing.AllocsPerRun(100, func() { Turn(100)() }); n != 0 {
		t.Errorf("a turn allocates %v times", n)
	}
}
