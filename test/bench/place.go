//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// A comparison has its server alone on one core, and its clients and boards on another, so
// that the CPU time of a server is not the time in which it shared a cache with its load.
const (
	serverCore = 0
	clientCore = 1
)

// minBusy is the share of its core that a server must use for a figure to be called saturated.
// A server that waits part of the time handles less in each wake-up, and costs more per operation.
const minBusy = 0.90

// startOnServerCore is start for a program that may use one core only. A Go program then has a
// GOMAXPROCS of 1.
func startOnServerCore(wait time.Duration, ready func(line string) bool, name string, args ...string) (*process, string, error) {
	return start(wait, ready, "taskset", append([]string{"-c", strconv.Itoa(serverCore), name}, args...)...)
}

// pinClient keeps this process's threads on the clients' core until the returned function
// gives them all cores back. Threads that start meanwhile inherit it.
func pinClient() (unpin func(), err error) {
	if runtime.NumCPU() < 2 {
		return nil, errors.New("needs two cores: one for the servers, one for their clients")
	}
	if err := setCores(clientCore); err != nil {
		return nil, err
	}
	setPriority("-20")
	return func() {
		all := make([]int, runtime.NumCPU())
		for i := range all {
			all[i] = i
		}
		_ = setCores(all...)
		setPriority("0")
	}, nil
}

// setPriority is that of the bench and its servers against the programs of other terminals, where
// the kernel groups processes by terminal and the bench runs as root; elsewhere it does nothing.
func setPriority(nice string) { _ = os.WriteFile("/proc/self/autogroup", []byte(nice), 0) }

// setCores restricts the threads of this process.
func setCores(cores ...int) error {
	var set unix.CPUSet
	for _, c := range cores {
		set.Set(c)
	}
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	for _, t := range threads {
		id, err := strconv.Atoi(t.Name())
		if err != nil {
			return err
		}
		if err := unix.SchedSetaffinity(id, &set); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("cannot choose the cores of thread %d: %w", id, err)
		}
	}
	return nil
}
