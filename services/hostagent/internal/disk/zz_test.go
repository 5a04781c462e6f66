package disk
const childVar = "BERTH_DISK_CHILD"
func child() int { return 0 }
