//go:build !linux

package inspect

import "context"

// Machine reads this machine, which only Linux builds can.
type Machine struct{}

// New returns nil: boards run Linux.
func New(Options) *Machine { return nil }

// SeesProcesses reports false.
func (*Machine) SeesProcesses() bool { return false }

// Info returns nothing.
func (*Machine) Info(context.Context) Info { return Info{} }

// Processes returns nothing.
func (*Machine) Processes(context.Context, ProcessQuery) Processes { return Processes{} }

// Disks returns nothing.
func (*Machine) Disks(context.Context, int) Disks { return Disks{} }

// Network returns nothing.
func (*Machine) Network(context.Context, NetworkQuery) Network { return Network{} }
