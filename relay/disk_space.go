package relay

import (
	"fmt"

	"golang.org/x/sys/unix"

	"agentctl/relay/storage"
)

// A disk with less space than these is nearly full: 5 %, at least 64 MiB and at most 1 GiB. The
// event log alone may still grow by 256 MiB.
const (
	minFreeBytes   = 64 << 20
	maxFreeBytes   = 1 << 30
	freeOneOf      = 20
	nearlyFullName = "nearly_full"
)

// checkSpace warns while the disk of the state directory is nearly full. It writes nothing.
func (r *Relay) checkSpace() {
	var st unix.Statfs_t
	if unix.Statfs(r.opt.StateDir, &st) != nil || st.Blocks == 0 {
		return // the stores' own operations show what is wrong
	}
	size := uint64(st.Bsize)
	r.reportSpace(st.Bavail*size, st.Blocks*size)
}

func (r *Relay) reportSpace(free, total uint64) {
	watch := r.storage.Watch(storeEvents)
	if free >= min(max(total/freeOneOf, minFreeBytes), maxFreeBytes) {
		watch.Resolve(nearlyFullName)
		return
	}
	watch.Report(nearlyFullName, storage.Problem{Kind: storage.NearlyFull, Warning: true,
		Detail: fmt.Sprintf("%d MiB are free on the disk of %s", free>>20, r.opt.StateDir)})
}
