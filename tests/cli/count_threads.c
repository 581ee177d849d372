// Counts the threads that a process starts, and writes their number at its end into $MOA_COUNT_THREADS.PID. Beyond
// $MOA_MOST_THREADS, where it is set, there are none, as where the system refuses them.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef int Create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);

static atomic_int started;

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* argument) {
    Create* create = NULL;
    *(void**)&create = dlsym(RTLD_NEXT, "pthread_create");
    const char* most = getenv("MOA_MOST_THREADS");
    if (most != NULL && started >= atoi(most)) return EAGAIN;
    ++started;
    return create(thread, attributes, body, argument);
}

__attribute__((destructor)) static void write_down(void) {
    char path[4096];
    snprintf(path, sizeof path, "%s.%ld", getenv("MOA_COUNT_THREADS"), (long)getpid());
    FILE* file = fopen(path, "w");
    if (file == NULL) return;
    fprintf(file, "%d", started);
    fclose(file);
}
