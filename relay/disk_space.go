package relay

import (
	"fmt"

	"golang.org/x/sys/unix"

	"agentctl/relay/storage"
)

// A disk counts as nearly full when less than a twentieth of it is free, within these bounds: a
// small one with less than 64 MiB, a large one with less than 1 GiB. The event log alone may still
// grow by 256 MiB.
const (
	freePart         = 20
	minFreeThreshold = 64 << 20 // bytes
	maxFreeThreshold = 1 << 30
)

// nearlyFullProblem names the problem for storage.Watch.
const nearlyFullProblem = "nearly_full"

// checkSpace warns while the disk of the state directory is nearly full. It writes nothing.
func (r *Relay) checkSpace() {
	var st unix.Statfs_t
	if unix.Statfs(r.opt.StateDir, &st) != nil || st.Blocks == 0 {
		return // the stores' own operations show what is wrong
	}
	size := uint64(st.Bsize)
	r.reportSpace(st.Bavail*size, st.Blocks*size)
}

// reportSpace raises or clears the warning; free and total are bytes.
func (r *Relay) reportSpace(free, total uint64) {
	watch := r.storage.Watch(storeEvents)
	if free >= min(max(total/freePart, minFreeThreshold), maxFreeThreshold) {
		watch.Resolve(nearlyFullProblem)
		return
	}
	watch.Report(nearlyFullProblem, storage.Problem{Kind: storage.NearlyFull, Warning: true,
		Detail: fmt.Sprintf("%d MiB are free on the disk of %s", free>>20, r.opt.StateDir)})
}
